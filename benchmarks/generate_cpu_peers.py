"""Text generation on the CPU by a Llama of half a billion parameters: mica and transformers, alternating.

    python3 benchmarks/generate_cpu_peers.py --program build/bin/bench_generate --json generate_cpu.jsonl

Both use the same model shape, random weights and number of threads. A step generates one token by greedy decoding after
a prompt of 16 or 1,024 tokens. transformers runs its forward eagerly with a dynamic cache and, with --compile, compiled
with a static cache. The prompt is a forward pass of 256 tokens that computes the last logits only. The programs
alternate; each result is the minimum over all rounds, since other work on the machine only adds time.

On some virtual machines, oneDNN's AMX kernels crash PyTorch with SIGILL; there, set
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16. The results record this setting.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time

import torch
import transformers

SHAPE = {"vocab": 128256, "layers": 24, "heads": 16, "key-heads": 4, "head-width": 64, "width": 1024, "hidden": 4096}


def model_of(layers, dtype):
    config = transformers.LlamaConfig(
        vocab_size=SHAPE["vocab"], num_hidden_layers=layers, num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["key-heads"], head_dim=SHAPE["head-width"], hidden_size=SHAPE["width"],
        intermediate_size=SHAPE["hidden"], tie_word_embeddings=True, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    torch.set_default_dtype(torch.float32)
    some = (0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for part in flat.split(some.numel()):
                part.copy_(some[:part.numel()])
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def elapsed_ms(work):
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


@torch.inference_mode()
def peer_times(model, forward, prompt, args, static):
    """The time of each step after a prompt, in ms."""
    tokens = torch.full((1, prompt), 5)
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=prompt + args.tokens + 8)
    else:
        cache = transformers.DynamicCache(config=model.config)
    position = torch.arange(prompt)
    token = model(tokens, past_key_values=cache, position_ids=position[None], use_cache=True,
                  logits_to_keep=1).logits[:, -1:].argmax(-1)
    position = position[-1:] + 1
    times = []

    def step():
        nonlocal token, position
        logits = forward(token, past_key_values=cache, position_ids=position[None], use_cache=True).logits
        token = logits[:, -1:].argmax(-1)
        position = position + 1
        token.tolist()

    for _ in range(args.tokens):
        times.append(elapsed_ms(step))
    return times[args.tokens // 3:]


@torch.inference_mode()
def peer_prefill(model, args):
    tokens = torch.randint(0, SHAPE["vocab"], (1, args.prefill))
    return [elapsed_ms(lambda: model(tokens, use_cache=True, logits_to_keep=1)) for _ in range(4)]


def mica_times(dtype, bits, prompt, prefill, args):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "result.json"
        command = [args.program, "--json", str(path), "--device", "cpu", "--dtype", dtype, "--bits", str(min(bits, 16)),
                   "--tokens", str(args.tokens), "--prompt", str(prompt), "--repeats", "1", "--prefill", str(prefill),
                   "--threads", str(args.threads)]
        for name, value in {**SHAPE, "layers": args.layers}.items():
            command += [f"--{name}", str(value)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="path of bench_generate")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4], help="bits of mica's quantized weights")
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 1024])
    parser.add_argument("--tokens", type=int, default=30)
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="also run transformers with torch.compile")
    parser.add_argument("--json", help="file for the results, one line of JSON each")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    least = {}

    def note(who, dtype, bits, what, milliseconds):
        key = (who, dtype, bits, what)
        least[key] = min(least.get(key, float("inf")), milliseconds)

    def note_mica(dtype, bits, prompt, prefill):
        row = mica_times(dtype, bits, prompt, prefill, args)
        note("mica", dtype, bits, f"step after {prompt}", row["least_us"] / 1e3)
        if prefill:
            note("mica", dtype, bits, f"prompt of {prefill}", row["least_prefill_ms"])

    for dtype in args.dtypes:
        model = model_of(args.layers, getattr(torch, dtype))
        compiled = torch.compile(model.forward) if args.compile else None
        full = 16 if dtype == "bfloat16" else 32
        for _ in range(args.rounds):
            for i, prompt in enumerate(args.prompts):
                note_mica(dtype, full, prompt, args.prefill if i == 0 else 0)
                note("transformers", dtype, full, f"step after {prompt}",
                     min(peer_times(model, model.forward, prompt, args, False)))
                if compiled:
                    note("transformers, compiled", dtype, full, f"step after {prompt}",
                         min(peer_times(model, compiled, prompt, args, True)))
            note("transformers", dtype, full, f"prompt of {args.prefill}",
                 min(peer_prefill(model, args)))
            if dtype == "bfloat16":
                for bits in args.bits:
                    for i, prompt in enumerate(args.prompts):
                        note_mica(dtype, bits, prompt, args.prefill if i == 0 else 0)
        del model, compiled

    rows = [{"who": who, "dtype": dtype, "bits": bits, "what": what, "least_ms": round(ms, 2), "threads": args.threads}
            for (who, dtype, bits, what), ms in least.items()]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__,
                "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "")}
    for row in rows:
        print(f"{row['who']:24} {row['dtype']:9} {row['bits']:2} bits, {row['what']:16}: {row['least_ms']:9.2f} ms")
    if args.json:
        with open(args.json, "w") as file:
            for row in rows:
                file.write(json.dumps({**row, **versions}) + "\n")


if __name__ == "__main__":
    main()
