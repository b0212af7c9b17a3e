"""Training steps of a GPT, mica and PyTorch: eager, compiled, and compiled in a CUDA graph of the whole step.

    python3 benchmarks/train_peers.py --program build/cuda/bin/bench_train --text input.txt

All start from the same weights and see the same batches, passed as safetensors files. PyTorch keeps float32 parameters
and computes under autocast, with the fused AdamW. Times are medians of steps after a warm-up, measured by events on the
device, without host synchronization. With --ddp FILE, as one of several ranks started by torchrun, only PyTorch trains:
first on each GPU alone, then with DistributedDataParallel, both with torch.compile. With --curve N, the losses of N
steps of mica and PyTorch are compared, in float32 and in --dtype, on real text if --text is given.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import peers

# layers, heads, width, vocabulary, context, batch, biases
MODELS = {
    "gpt2-124m": (12, 12, 768, 50304, 1024, 32, True),
    "gpt2-350m": (24, 16, 1024, 50304, 1024, 16, True),
    "gpt2-774m": (36, 20, 1280, 50304, 1024, 16, True),
    "gpt2-1558m": (48, 25, 1600, 50304, 1024, 16, True),
    "character": (6, 6, 384, 65, 256, 64, False),
}
CURVE_LR = 6e-4  # the settings commonly used to train GPT-2
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Block(torch.nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.ln_1 = torch.nn.LayerNorm(width, bias=bias)
        self.attn = torch.nn.ModuleDict({"c_attn": torch.nn.Linear(width, 3 * width, bias=bias),
                                         "c_proj": torch.nn.Linear(width, width, bias=bias)})
        self.ln_2 = torch.nn.LayerNorm(width, bias=bias)
        self.mlp = torch.nn.ModuleDict({"c_fc": torch.nn.Linear(width, 4 * width, bias=bias),
                                        "c_proj": torch.nn.Linear(4 * width, width, bias=bias)})

    def forward(self, x):
        b, t, c = x.shape
        heads = [part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
                 for part in self.attn["c_attn"](self.ln_1(x)).split(c, dim=2)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT(torch.nn.Module):
    def __init__(self, layers, heads, width, vocab, context, bias):
        super().__init__()
        self.wte = torch.nn.Embedding(vocab, width)
        self.wpe = torch.nn.Embedding(context, width)
        self.h = torch.nn.ModuleList([Block(width, heads, bias) for _ in range(layers)])
        self.ln_f = torch.nn.LayerNorm(width, bias=bias)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Batches:
    """As in bench_train: consecutive windows, wrapping around at the end of the tokens."""

    def __init__(self, tokens, batch, context, device):
        count = (tokens.numel() - 1) // context
        tokens = tokens.to(device, torch.int64)
        self.inputs = tokens[:count * context].view(count, context)
        self.targets = tokens[1:count * context + 1].view(count, context)
        self.batch, self.at = batch, 0

    def next(self):
        if self.at + self.batch > len(self.inputs):
            self.at = 0
        part = slice(self.at, self.at + self.batch)
        self.at += self.batch
        return self.inputs[part], self.targets[part]


class Trainer:
    def __init__(self, args, files, kind, dtype, batch):
        self.model = GPT(args.layers, args.heads, args.width, args.vocab, args.context, args.bias)
        self.model.load_state_dict(load_file(files / "weights.safetensors"))
        self.model.to(args.device)
        self.batches = Batches(load_file(files / "tokens.safetensors")["tokens"], batch, args.context, args.device)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                            {"params": others, "weight_decay": 0}], lr=3e-4, betas=(0.9, 0.95),
                                           fused=args.device == "cuda", capturable=kind == "graph")
        self.forward = self.model if kind == "eager" else torch.compile(self.model)
        self.cast = (contextlib.nullcontext if dtype == torch.float32 else
                     lambda: torch.autocast(args.device, dtype=dtype))
        self.losses = []
        if kind == "graph":
            self.capture()

    def compute(self, inputs, targets):
        with self.cast():
            loss = self.forward(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def step(self):
        self.losses.append(self.compute(*self.batches.next()))

    def capture(self):
        static = [x.clone() for x in self.batches.next()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.compute(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.compute(*static)

        def step():
            for to, come in zip(static, self.batches.next()):
                to.copy_(come)
            graph.replay()
            self.losses.append(loss.clone())

        self.step = step


def median_ms(step, warmup, steps, cuda):
    for _ in range(warmup):
        step()
    if not cuda:
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def torch_row(args, files, kind):
    trainer = Trainer(args, files, kind, DTYPES[args.dtype], args.batch)
    ms = median_ms(lambda: trainer.step(), args.warmup, args.steps, args.device == "cuda")
    return {"by": f"torch {kind}", "ms": ms, "tokens_per_s": args.batch * args.context / ms * 1e3,
            "peak_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else 0,
            "loss": float(trainer.losses[-1])}


def mica_options(args, files, batch, dtype, steps, warmup):
    sizes = [f"--{name}={getattr(args, name)}" for name in ("layers", "heads", "width", "vocab", "context")]
    return [args.program, *sizes, f"--bias={int(args.bias)}", f"--batch={batch}", f"--device={args.device}",
            f"--dtype={dtype}", f"--steps={steps}", f"--warmup={warmup}", f"--weights={files / 'weights.safetensors'}",
            f"--tokens={files / 'tokens.safetensors'}"] + args.mica


def mica_row(args, files):
    out = files / "row.json"
    subprocess.run([*mica_options(args, files, args.batch, args.dtype, args.steps, args.warmup), f"--json={out}"],
                   check=True)
    return {"by": "mica", **json.loads(out.read_text())}


def curve_rows(args, files):
    """The loss of every step of mica and PyTorch, each in float32 and in --dtype, and its distance from PyTorch's
    float32. float32 products do not use TF32 in either. Weights, batches and the recipe are the same: warm-up to
    CURVE_LR, betas 0.9 and 0.95, weight decay 0.1 of matrices, clipping at 1."""
    kinds = ["float32"] + ([args.dtype] if args.dtype != "float32" else [])
    losses = {}
    for dtype in kinds:
        out = files / "losses.safetensors"
        run = [*mica_options(args, files, args.curve_batch, dtype, args.curve - 1, 1), f"--lr={CURVE_LR}",
               f"--lr-warmup={args.curve_warmup}", f"--losses={out}"]
        subprocess.run([option for option in run if option != "--graph"], check=True)
        losses["mica", dtype] = load_file(out)["losses"].double()
    for dtype in kinds:
        trainer = Trainer(args, files, "eager", DTYPES[dtype], args.curve_batch)
        for step in range(args.curve):
            for group in trainer.optimizer.param_groups:
                group["lr"] = CURVE_LR * min(1, (step + 1) / (args.curve_warmup + 1))
            trainer.step()
        losses["torch", dtype] = torch.stack(trainer.losses).double().cpu()
        del trainer
    truth = losses["torch", "float32"]
    for (by, dtype), curve in losses.items():
        apart = (curve - truth).abs()
        yield {"by": f"{by} {dtype}, curve", "dtype": dtype, "batch": args.curve_batch, "steps": args.curve,
               "lr": CURVE_LR, "lr_warmup": args.curve_warmup, "most_apart": float(apart.max()),
               "at_step": int(apart.argmax()), "mean_apart": float(apart.mean()),
               "losses": [round(loss, 5) for loss in curve.tolist()]}


def ddp_rows(args):
    """torch.compile on each GPU alone, all at once, and then with DistributedDataParallel. Returns rank 0's rows."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    with tempfile.TemporaryDirectory() as folder:
        files = pathlib.Path(folder)
        write_inputs(args, files)
        trainer = Trainer(args, files, "compile", DTYPES[args.dtype], args.batch)
        times = {"torch compile, one GPU": median_ms(lambda: trainer.step(), args.warmup, args.steps, True)}
        torch.compiler.reset()
        trainer.forward = torch.compile(torch.nn.parallel.DistributedDataParallel(
            trainer.model, gradient_as_bucket_view=True))
        torch.distributed.barrier()
        times["torch compile, DDP"] = median_ms(lambda: trainer.step(), args.warmup, args.steps, True)
    for by, ms in times.items():
        all_ms = [None] * ranks
        torch.distributed.all_gather_object(all_ms, ms)
        if rank == 0:
            count = ranks if by.endswith("DDP") else 1
            yield {"by": by, "ranks": count, "ms": max(all_ms), "ms_of_ranks": all_ms,
                   "tokens_per_s": count * args.batch * args.context / max(all_ms) * 1e3}
    torch.distributed.destroy_process_group()


def write_inputs(args, files):
    torch.manual_seed(1)
    model = GPT(args.layers, args.heads, args.width, args.vocab, args.context, args.bias)
    # Rounded to 16 bits, so that all start from equal weights.
    save_file({name: p.detach().bfloat16().float() for name, p in model.named_parameters()},
              files / "weights.safetensors")
    if args.text is not None and args.text.exists():
        text = args.text.read_bytes()
        symbols = sorted(set(text))
        tokens = torch.tensor([symbols.index(c) for c in text], dtype=torch.int32)
    else:
        print("no text: random tokens", flush=True)
        most = max(args.batch, args.curve_batch)
        tokens = torch.randint(0, args.vocab, (4 * most * args.context + 1,), dtype=torch.int32)
    save_file({"tokens": tokens}, files / "tokens.safetensors")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True, help="path of bench_train")
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    for name in ("layers", "heads", "width", "vocab", "context", "batch"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--by", nargs="*", default=["mica", "eager", "compile", "graph"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--text", type=pathlib.Path, help="text whose bytes are the tokens")
    parser.add_argument("--ddp", type=pathlib.Path, help="file for the results of several ranks")
    parser.add_argument("--curve", type=int, default=0, help="number of steps whose losses are compared")
    parser.add_argument("--curve-batch", type=int, default=8)
    parser.add_argument("--curve-warmup", type=int, default=50, help="warm-up steps of the learning rate")
    parser.add_argument("--mica", nargs=argparse.REMAINDER, default=[], help="all further arguments go to bench_train")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    args = parser.parse_args()
    *sizes, args.bias = MODELS[args.model]
    for name, size in zip(("layers", "heads", "width", "vocab", "context", "batch"), sizes):
        if getattr(args, name) is None:
            setattr(args, name, size)
    return args


def main():
    args = parse_arguments()
    about = {"model": args.model, "dtype": args.dtype, "batch": args.batch, "context": args.context,
             "torch": torch.__version__,
             "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
    if args.ddp is not None:
        rows = [{**about, **row} for row in ddp_rows(args)]
        if rows:
            args.ddp.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    wrong = False
    with tempfile.TemporaryDirectory() as folder, peers.results_file(args.out / f"train_{args.model}.jsonl") as log:
        files = pathlib.Path(folder)
        write_inputs(args, files)
        for by in args.by:
            row = mica_row(args, files) if by == "mica" else torch_row(args, files, by)
            print(json.dumps({**about, **row}), file=log, flush=True)
            print(f"{row['by']:14}{row['ms']:9.2f} ms {row['tokens_per_s']:9.0f} tokens/s "
                  f"{row['peak_bytes'] / 2**30:7.2f} GiB  loss {row['loss']:.4f}", flush=True)
            torch.compiler.reset()
            if args.device == "cuda":
                torch.cuda.empty_cache()
        for row in curve_rows(args, files) if args.curve > 0 else ():
            print(json.dumps({**about, **row}), file=log, flush=True)
            print(f"{row['by']:24} at most {row['most_apart']:.4f} from torch float32 (step {row['at_step']}), "
                  f"{row['mean_apart']:.4f} in the mean, last loss {row['losses'][-1]:.4f}", flush=True)
            wrong = wrong or (row["by"].startswith("mica") and row["most_apart"] > 0.02)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
