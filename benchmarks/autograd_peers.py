"""Compares the host overhead of autograd in mica and PyTorch: the ops of bench_autograd, on 64 floats.

    python3 benchmarks/autograd_peers.py --program build/bin/bench_autograd

The programs alternate, --rounds times each, so that other load affects both; the result is the minimum of the rounds'
medians. Every run is a separate process, on one thread. Runs on the CPU and, if there is one, on the GPU.
"""

import json

import peers

SIZE = 64
CHAIN = 2000
CALLS = 200


def torch_rows(args):
    """In the child process: prints one line of JSON per op, like bench_autograd."""
    import torch
    torch.set_num_threads(1)

    for device in devices(args.device, torch.cuda.is_available()):
        x = torch.randn(SIZE, device=device, requires_grad=True)
        b, dy = torch.randn(SIZE, device=device), torch.randn(SIZE, device=device)

        def chain(op):
            y = x
            for _ in range(CHAIN):
                y = op(y, b)
            y.backward(dy)
            x.grad = None

        works = {
            "add": (1, CALLS, lambda: torch.add(b, dy)),
            "add_recorded": (1, CALLS, lambda: torch.add(x, b)),
            "mul_recorded": (1, CALLS, lambda: torch.mul(x, b)),
            "chain_add": (CHAIN, 1, lambda: chain(torch.add)),
            "chain_mul": (CHAIN, 1, lambda: chain(torch.mul)),
        }
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        for op, (ops, calls, work) in works.items():
            us = peers.median_us(work, args.repeats, calls, wait) / ops
            print(json.dumps({"op": op, "device": device, "M": ops, "N": SIZE, "us": us, "torch": torch.__version__}),
                  flush=True)


def devices(name, gpu):
    return ["cpu"] + ["cuda"] * gpu if name == "auto" else [name]


def add_options(parser):
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])


def main():
    args = peers.parse_arguments(__doc__, "bench_autograd", torch_rows, add_options)
    options = ["--device", args.device, "--repeats", str(args.repeats)]
    contestants = {
        "mica": lambda: peers.run_mica(args.program, options),
        "torch": lambda: peers.run_torch(options),
    }
    best = peers.take_turns(contestants, args.rounds, args.out / "autograd.jsonl", {},
                            lambda row: (row["device"], row["op"]))

    print(f"{'us an op, ' + str(SIZE) + ' floats':26}" + "".join(f"{name:>10}" for name in contestants))
    for (device, op), times in best.items():
        print(f"{device:6}{op:20}" + "".join(f"{times[name]:10.3f}" for name in contestants))


if __name__ == "__main__":
    main()
