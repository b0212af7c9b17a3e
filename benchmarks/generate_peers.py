"""Text generation by a Llama of half a billion parameters, mica and transformers in one run.

    python3 benchmarks/generate_peers.py --program build/cuda/bin/bench_generate --json generate.jsonl
    python3 benchmarks/generate_peers.py --program build/bin/bench_generate --device cpu --threads 2 --dtype float32

Both use the same model shape, random weights, greedy decoding, and prompts of 16 tokens. transformers uses a static
cache and, unless --eager is given, a step compiled by torch.compile (with CUDA graphs on a GPU). Steps are timed on the
host's clock, from the first third to the end of a text; the host reads each step's tokens. The prompt is a forward pass
of 2,048 tokens that computes the last logits only.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
import transformers

SHAPE = {"vocab": 128256, "layers": 24, "heads": 16, "key-heads": 4, "head-width": 64, "width": 1024, "hidden": 4096}


def model_of(shape, dtype, device):
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"], num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
        num_key_value_heads=shape["key-heads"], head_dim=shape["head-width"], hidden_size=shape["width"],
        intermediate_size=shape["hidden"], tie_word_embeddings=True, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    torch.manual_seed(1)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model.eval()


def median_ms(device, repeats, work):
    work()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


@torch.inference_mode()
def step_us(model, batch, args):
    """Decodes with a static cache, with one call of the (compiled) forward per token."""
    device = args.device
    cache = transformers.StaticCache(config=model.config, max_cache_len=args.prompt + args.tokens + 8)
    forward = model.forward
    if not args.eager:
        mode = "reduce-overhead" if device == "cuda" else "default"
        forward = torch.compile(model.forward, mode=mode, fullgraph=True)
    prompt = torch.full((batch, args.prompt), 5, dtype=torch.long, device=device)
    skipped = args.tokens // 3
    for _ in range(2):  # the first text triggers compilation
        cache.reset()
        position = torch.arange(args.prompt, device=device)
        token = model(prompt, past_key_values=cache, position_ids=position[None], use_cache=True,
                      logits_to_keep=1).logits[:, -1:].argmax(-1)
        position = position[-1:] + 1
        for i in range(args.tokens):
            if i == skipped:
                begin = time.perf_counter()
            logits = forward(token, past_key_values=cache, position_ids=position[None], use_cache=True).logits
            token = logits[:, -1:].argmax(-1).clone()
            position = position + 1
            token.tolist()
        us = 1e6 * (time.perf_counter() - begin) / (args.tokens - skipped)
    return us


@torch.inference_mode()
def prefill_ms(model, batch, args):
    tokens = torch.randint(0, SHAPE["vocab"], (batch, args.prefill), device=args.device)
    return median_ms(args.device, 10, lambda: model(tokens, use_cache=True, logits_to_keep=1))


def mica_results(shape, batch, bits, args):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "result.json"
        command = [args.program, "--json", str(path), "--batch", str(batch), "--bits", str(bits), "--device", args.device,
                   "--dtype", args.dtype, "--tokens", str(args.tokens), "--prompt", str(args.prompt), "--repeats", "3",
                   "--prefill", str(args.prefill if bits == 16 and batch == 1 else 0), "--threads", str(args.threads)]
        for name, value in shape.items():
            command += [f"--{name}", str(value)]
        subprocess.run(command, check=True)
        return json.loads(path.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="path of bench_generate")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4],
                        help="bits of mica's weights; 16: not quantized")
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="run transformers without torch.compile")
    parser.add_argument("--json", help="file for the results, one line of JSON each")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch._dynamo.config.cache_size_limit = 64
    shape = {**SHAPE, "layers": args.layers}

    results = [mica_results(shape, batch, bits, args) for bits in args.bits for batch in args.batches]
    model = model_of(shape, getattr(torch, args.dtype), args.device)
    for batch in args.batches:
        torch._dynamo.reset()
        results.append({"who": "transformers" if args.eager else "transformers, compiled", "device": args.device,
                        "dtype": args.dtype, "bits": 16, "batch": batch, "step_us": step_us(model, batch, args),
                        "prompt": args.prefill,
                        "prefill_ms": prefill_ms(model, batch, args) if batch == 1 and args.prefill else 0.0,
                        "transformers": transformers.__version__, "torch": torch.__version__})
    for row in results:
        print(f"{row['who']:24} {row['bits']:2} bits, batch {row['batch']:2}: {row['step_us']:9.1f} us a step, "
              f"{row['batch'] / row['step_us'] * 1e6:9.0f} tokens/s, prompt {row['prefill_ms']:.2f} ms")
    if args.json:
        with open(args.json, "w") as file:
            for row in results:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
