"""The time of an AdamW step for all parameters of GPT-2 (124 M), mica and PyTorch.

    python3 benchmarks/adamw_peers.py --program build/bin/bench_adamw --device cuda

The programs alternate, --rounds times each; the result is the minimum of the rounds' medians. On CUDA the L2 cache is
flushed before each run. PyTorch uses the fused optimizer and the foreach clip_grad_norm_. It keeps no master weights:
for 16-bit training its parameters are float32, so compare its float32 with mica's adamw_master.
"""

import json

import peers


def shapes(layers, width):
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,),
             (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50304, width), (1024, width), *block * layers, (width,), (width,)]


def torch_rows(args):
    """In the child process: prints one line of JSON per op, like bench_adamw."""
    import torch

    torch.manual_seed(1)
    clock = peers_clock(args)
    for kind in torch.bfloat16, torch.float32:
        parameters = [(torch.randn(s, device=args.device) * 0.02).to(kind).requires_grad_()
                      for s in shapes(args.layers, args.width)]
        for x in parameters:
            x.grad = (torch.randn(x.shape, device=args.device) * 1e-3).to(kind)
        groups = [{"params": [x for x in parameters if x.dim() >= 2], "weight_decay": 0.1},
                  {"params": [x for x in parameters if x.dim() < 2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        clip = lambda: torch.nn.utils.clip_grad_norm_(parameters, 0.5)

        def clipped_step():
            clip()
            optimizer.step()

        for op, run in {"adamw": optimizer.step, "adamw_clip": clipped_step, "clip_grad_norm_": clip}.items():
            print(json.dumps({"op": op, "device": args.device, "dtype": str(kind).removeprefix("torch."), "M": 1,
                              "N": sum(x.numel() for x in parameters), "us": clock(run), "torch": torch.__version__}),
                  flush=True)


def peers_clock(args):
    if args.device == "cuda":
        import gpu_peers
        return gpu_peers.Clock(20, args.repeats).median_us
    return lambda run: peers.median_us(run, args.repeats)


def add_options(parser):
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)


def main():
    args = peers.parse_arguments(__doc__, "bench_adamw", torch_rows, add_options)
    options = ["--device", args.device, "--layers", str(args.layers), "--width", str(args.width),
               "--repeats", str(args.repeats)]
    contestants = {
        "mica": lambda: peers.run_mica(args.program, options),
        "torch": lambda: peers.run_torch(options),
    }
    best = peers.take_turns(contestants, args.rounds, args.out / f"adamw_{args.device}.jsonl", {},
                            lambda row: (row["dtype"], row["op"]))

    print(f"{'us':32}" + "".join(f"{name:>10}" for name in contestants))
    for (dtype, op), times in best.items():
        print(f"{dtype:10}{op:22}" + "".join(f"{times.get(name, float('nan')):10.1f}" for name in contestants))


if __name__ == "__main__":
    main()
