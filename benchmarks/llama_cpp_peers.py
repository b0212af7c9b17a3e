"""Text generation on the CPU by mica and llama.cpp, alternating, from the same GGUF files.

    python3 benchmarks/llama_cpp_peers.py --program build/bin/bench_generate --json llama_cpp.jsonl

Needs the packages xllamacpp, gguf and numpy. The files have random weights in the shapes of SmolLM2-135M and
Qwen2-0.5B; matrices have one format, and the head, which is also the embedding, has that of llama.cpp's own files: Q8_0
for Q4_0, Q6_K for K-quants. A step generates one token greedily after a prompt of 16. Both programs have the same number
of threads. The results are the least times over all rounds, of the clock or, on a busy machine with one thread, of the
CPU (--clock cpu).
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
import time

import gguf
import numpy as np
import xllamacpp

Q = gguf.GGMLQuantizationType
SHAPES = {
    "135M": {"arch": "llama", "vocab": 49152, "layers": 30, "heads": 9, "key_heads": 3, "width": 576, "hidden": 1536},
    "0.5B": {"arch": "qwen2", "vocab": 151936, "layers": 24, "heads": 14, "key_heads": 2, "width": 896, "hidden": 4864},
}
# name: format of the matrices, of the head, dtype of mica's activations
FORMATS = {
    "F32": (Q.F32, Q.F32, "float32"),
    "BF16": (Q.BF16, Q.BF16, "bfloat16"),
    "Q8_0": (Q.Q8_0, Q.Q8_0, "float32"),
    "Q4_0": (Q.Q4_0, Q.Q8_0, "float32"),
    "Q4_K": (Q.Q4_K, Q.Q6_K, "float32"),
    "Q6_K": (Q.Q6_K, Q.Q6_K, "float32"),
}


def some_rows(kind, columns, rng):
    """About 2^20 random elements in rows of `columns`, as bytes (rows, bytes per row)."""
    rows = max(1, (1 << 20) // columns)
    if kind not in (Q.Q4_K, Q.Q6_K):
        values = (0.02 * rng.standard_normal((rows, columns))).astype(np.float32)
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-5).tobytes(), np.uint8)
    blocks[:, -2:] = scale  # of Q6_K
    if kind == Q.Q4_K:
        blocks[:, :2], blocks[:, 2:4] = scale, scale
    return blocks.reshape(rows, -1)


def write_file(path, shape, matrix, head):
    rng = np.random.default_rng(1)
    s, arch = shape, shape["arch"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(8192)
    writer.add_embedding_length(s["width"])
    writer.add_block_count(s["layers"])
    writer.add_feed_forward_length(s["hidden"])
    writer.add_head_count(s["heads"])
    writer.add_head_count_kv(s["key_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(s["vocab"])
    # A byte-level vocabulary without merges, since llama.cpp's server turns tokens into text.
    code = [b if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255 else 0 for b in range(256)]
    spare = iter(range(256, 512))
    tokens = [chr(c if c else next(spare)) for c in code]
    tokens += [f"<{i}>" for i in range(256, s["vocab"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * s["vocab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(s["vocab"] - 1)
    cache = {}

    def add_matrix(name, rows, columns, kind):
        # llama.cpp, too, gives rows that are not whole blocks of 256 elements another format.
        if columns % gguf.GGML_QUANT_SIZES[kind][0] != 0:
            kind = Q.Q5_0 if kind == Q.Q4_K else Q.Q8_0
        if (kind, columns) not in cache:
            cache[kind, columns] = some_rows(kind, columns, rng)
        data = np.resize(cache[kind, columns], (rows, cache[kind, columns].shape[1]))
        if kind == Q.F32:
            writer.add_tensor(name, data.view(np.float32))
        else:
            writer.add_tensor(name, data, raw_dtype=kind)

    def add_vector(name, size, value):
        writer.add_tensor(name, np.full(size, value, np.float32))

    kv = 64 * s["key_heads"]
    add_matrix("token_embd.weight", s["vocab"], s["width"], head)
    add_vector("output_norm.weight", s["width"], 1)
    for i in range(s["layers"]):
        prefix = f"blk.{i}."
        for name, rows, columns in [("attn_q", s["width"], s["width"]), ("attn_k", kv, s["width"]),
                                    ("attn_v", kv, s["width"]), ("attn_output", s["width"], s["width"]),
                                    ("ffn_gate", s["hidden"], s["width"]), ("ffn_up", s["hidden"], s["width"]),
                                    ("ffn_down", s["width"], s["hidden"])]:
            add_matrix(f"{prefix}{name}.weight", rows, columns, matrix)
            if arch == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                add_vector(f"{prefix}{name}.bias", rows, 0.01)
        add_vector(f"{prefix}attn_norm.weight", s["width"], 1)
        add_vector(f"{prefix}ffn_norm.weight", s["width"], 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    def __init__(self, path, args):
        p = xllamacpp.CommonParams()
        p.model.path = str(path)
        p.n_ctx, p.n_parallel, p.n_batch, p.n_ubatch = 1024, 1, 512, 512
        p.warmup = False
        p.verbosity = -1
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = args.threads
        self.server = xllamacpp.Server(p)
        self.tokens = args.tokens
        self.rng = np.random.default_rng(2)

    def complete(self, prompt, count):
        """Milliseconds of the CPU, and llama.cpp's own timings."""
        request = {"prompt": [int(t) for t in self.rng.integers(0, 40000, prompt)], "n_predict": count, "temperature": 0,
                   "top_k": 1, "samplers": ["top_k"], "ignore_eos": True, "cache_prompt": False, "stream": False}
        begin = time.process_time()
        answer = self.server.handle_completions(request)
        cpu = 1e3 * (time.process_time() - begin)
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        return cpu, answer["timings"]

    def measure(self, prefill):
        few, _ = self.complete(16, 2)
        many, t = self.complete(16, self.tokens)
        result = {"step": t["predicted_ms"] / t["predicted_n"], "cpu_step": (many - few) / (self.tokens - 2)}
        if prefill:
            cpu, t = self.complete(prefill, 1)
            result.update({"prompt": t["prompt_ms"], "cpu_prompt": cpu})
        return result


def measure_mica(path, dtype, prefill, args):
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        subprocess.run([args.program, "--model", str(path), "--device", "cpu", "--dtype", dtype, "--tokens",
                        str(args.tokens), "--prompt", "16", "--repeats", "1", "--prefill", str(prefill), "--threads",
                        str(args.threads), "--json", str(result)] + (["--exact"] if args.exact else []),
                       check=True, stdout=subprocess.DEVNULL)
        row = json.loads(result.read_text())
    return {"step": row["step_us"] / 1e3, "cpu_step": row["cpu_us"] / 1e3, "prompt": row["least_prefill_ms"],
            "cpu_prompt": row["cpu_prefill_ms"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="path of bench_generate")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--folder", help="keep the files here, and use those that exist")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prefill", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--exact", action="store_true", help="mica does not round activations")
    parser.add_argument("--json", help="file to which results are appended, one line of JSON each")
    args = parser.parse_args()
    prefix = "cpu_" if args.clock == "cpu" else ""
    print(f"{'':12} {'step: mica':>11} {'llama.cpp':>10} {'speed':>6}  {'prompt: mica':>12} {'llama.cpp':>10} {'speed':>6}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(args.folder or temporary)
        for shape in args.shapes:
            for name in args.formats:
                matrix, head, dtype = FORMATS[name]
                path = folder / f"{shape}-{name}.gguf"
                if not path.exists():
                    write_file(path, SHAPES[shape], matrix, head)
                peer = LlamaCpp(path, args)
                least = {}
                for i in range(args.rounds):
                    prefill = args.prefill if i < 2 else 0
                    for who, row in [("mica", measure_mica(path, dtype, prefill, args)),
                                     ("llama.cpp", peer.measure(prefill))]:
                        for what, ms in row.items():
                            if ms > 0:
                                least[who, what] = min(ms, least.get((who, what), ms))
                del peer
                row = {"shape": shape, "format": name, "threads": args.threads, "clock": args.clock,
                       "bytes": path.stat().st_size}
                for what in ("step", "prompt"):
                    for who in ("mica", "llama.cpp"):
                        row[f"{who} {what} ms"] = round(least[who, prefix + what], 3)
                print(f"{shape:5} {name:6} {row['mica step ms']:11.2f} {row['llama.cpp step ms']:10.2f} "
                      f"{row['llama.cpp step ms'] / row['mica step ms']:6.2f}  {row['mica prompt ms']:12.1f} "
                      f"{row['llama.cpp prompt ms']:10.1f} {row['llama.cpp prompt ms'] / row['mica prompt ms']:6.2f}",
                      flush=True)
                if args.json:
                    with open(args.json, "a") as file:
                        file.write(json.dumps(row) + "\n")
                if not args.folder:
                    path.unlink()


if __name__ == "__main__":
    main()
