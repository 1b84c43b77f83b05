"""What a bound costs: nanoseconds per token on one core or one GPU, all contenders in one run.

    python tests/benchmarks/bench_operator.py --out book/results/measured/solver-cost-cpu.json
    python tests/benchmarks/bench_operator.py --device cuda --out FILE

Times are the least of several repetitions: on a CPU the CPU time of one thread, so that other
processes disturb them little; on a GPU the wall time until it is done. Ratios within one
run are what to compare. KL, radius 0.05, float32, and probabilities as a language model's: most
near 1, with a tail.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import elementwise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bandpo.operator import inside_band, log_band, log_band_side
from bandpo.table import BandTable

RADIUS = 0.05


def sample_logp(n: int, device: str = "cpu") -> Tensor:
    """Log probabilities of sampled tokens: logits around 3, one in ten from a long tail."""
    generator = torch.Generator().manual_seed(0)
    body = torch.nn.functional.logsigmoid(3 + 3 * torch.randn(n, generator=generator))
    tail = -15 * torch.rand(n, generator=generator)
    return torch.where(torch.rand(n, generator=generator) < 0.1, tail, body).to(device)


def bisection(logp: Tensor, steps: int = 50) -> tuple[Tensor, Tensor]:
    """Both KL bounds by textbook bisection in r, vectorized, a fixed number of steps."""
    p = logp.exp()

    def inside(r: Tensor) -> Tensor:
        return -p * r.log() - (1 - p) * ((1 - p * r) / (1 - p)).log() <= RADIUS

    def edge(inner: Tensor, outer: Tensor) -> Tensor:
        for _ in range(steps):
            middle = 0.5 * (inner + outer)
            hit = inside(middle)
            inner, outer = torch.where(hit, middle, inner), torch.where(hit, outer, middle)
        return inner

    one = torch.ones_like(p)
    return edge(one, torch.zeros_like(p)), edge(one, 1 / p)


def find_root(logp: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Both KL bounds by SciPy's elementwise Chandrupatla, to its default tolerance."""
    p = logp.double().exp().numpy()

    def excess(q: np.ndarray, p: np.ndarray) -> np.ndarray:
        return -p * np.log(q / p) - (1 - p) * np.log((1 - q) / (1 - p)) - RADIUS

    with np.errstate(all="ignore"):
        lower = elementwise.find_root(excess, (p * 1e-290, p), args=(p,))
        upper = elementwise.find_root(excess, (p, np.full_like(p, 1 - 1e-16)), args=(p,))
    return lower.x, upper.x


def contenders(logp: Tensor) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool]]:
    """Name -> function, arguments, whether to measure it compiled too."""
    advantages = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1)).to(logp)
    logq = logp - 0.1
    table = BandTable.build("kl", RADIUS).to(logp.device)
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool]] = {
        "copy": (lambda x: x.clone(), (logp,), False),
        "exp and clamp": (lambda x: x.exp().clamp(0.8, 1.28), (logp,), True),
        "membership": (lambda x, y: inside_band(x, y).float(), (logp, logq), True),
        "table, one side": (lambda x, a: table.log_band_side(x, a > 0), (logp, advantages), True),
        "table, both sides": (table.log_band, (logp,), True),
        "Newton, one side": (lambda x, a: log_band_side(x, a > 0), (logp, advantages), True),
        "Newton, both sides": (log_band, (logp,), True),
        "closed form (tv), both sides": (lambda x: log_band(x, "tv"), (logp,), False),
        "generic, both sides": (lambda x: log_band(x, method="generic"), (logp,), False),
        "bisection, 50 steps, both sides": (bisection, (logp,), False),
    }
    if logp.device.type == "cpu":
        functions["SciPy find_root, both sides"] = (find_root, (logp,), False)
    return functions


class PeakMemory(TorchDispatchMode):
    """Largest number of bytes alive at once in tensors made under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.seen or not size:
            return
        self.seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)

        def freed() -> None:
            self.seen.discard(key)
            self.alive -= size

        weakref.finalize(storage, freed)


def clock(device: torch.device) -> float:
    """Seconds: this thread's on a CPU, the wall's after all that a GPU has to do."""
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def seconds(function: Callable[..., Any], arguments: tuple[Any, ...], budget: float) -> float:
    """Least time over repetitions, after one that warms up: of this thread, or of the GPU."""
    device = arguments[0].device
    function(*arguments)
    best, spent = math.inf, 0.0
    for repetition in range(50):
        start = clock(device)
        function(*arguments)
        best = min(best, took := clock(device) - start)
        spent += took
        if spent > budget and (repetition >= 2 or spent > 20 * budget):
            break
    return best


def measure(
    sizes: list[int], compiled_size: int, budget: float, device: str = "cpu"
) -> dict[str, Any]:
    """Nanoseconds per token of every contender at every size."""
    times: dict[str, dict[str, float]] = {}
    for n in sizes:
        logp = sample_logp(n, device)
        for name, (function, arguments, compile_too) in contenders(logp).items():
            if name.startswith("SciPy") and n > 100_000:
                continue
            times.setdefault(name, {})[str(n)] = seconds(function, arguments, budget) / n * 1e9
            if compile_too and n == compiled_size:
                torch.compiler.reset()
                compiled = torch.compile(function, fullgraph=True, dynamic=False)
                took = seconds(compiled, arguments, budget) / n * 1e9
                times.setdefault(f"{name}, compiled", {})[str(n)] = took
            print(
                n, {k: round(v[str(n)], 2) for k, v in times.items() if name in k and str(n) in v}
            )
    return times


def ratios(times: dict[str, dict[str, float]], size: int) -> dict[str, float]:
    """The comparisons that the book reports."""

    def at(name: str) -> float:
        return times[name][str(size)]

    textbook, cheap = at("bisection, 50 steps, both sides"), at("exp and clamp, compiled")
    return {
        "bisection / Newton both sides, eager": textbook / at("Newton, both sides"),
        "bisection / Newton one side, compiled": textbook / at("Newton, one side, compiled"),
        "membership / exp and clamp, compiled": at("membership, compiled") / cheap,
        "table one side / exp and clamp, compiled": at("table, one side, compiled") / cheap,
        "Newton one side / exp and clamp, compiled": at("Newton, one side, compiled") / cheap,
        "Newton both sides / copy, eager": at("Newton, both sides") / at("copy"),
        "Newton one side, compiled / copy": at("Newton, one side, compiled") / at("copy"),
        "membership, compiled / copy": at("membership, compiled") / at("copy"),
    }


def temporaries(n: int, device: str = "cpu") -> float:
    """Peak memory of a two-sided eager call, in tensors of the input's size, results included."""
    logp = sample_logp(n, device)
    with PeakMemory() as memory:
        log_band(logp)
    return memory.peak / (logp.numel() * logp.element_size())


def cpu_name() -> str:
    """The processor's model, as Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--compiled-size", type=int, default=10**6)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per contender and size")
    arguments = parser.parse_args()
    if arguments.compiled_size not in arguments.sizes:
        parser.error(f"--compiled-size {arguments.compiled_size} must be one of --sizes")
    on_cpu = arguments.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        parser.error(
            f"--device {arguments.device}: no GPU is here; leave it out to measure the CPU"
        )
    torch.set_num_threads(1)
    times = measure(arguments.sizes, arguments.compiled_size, arguments.budget, arguments.device)
    machine = {
        "cpu": cpu_name(),
        "threads": 1,
        "torch": torch.__version__,
        "vector": torch.backends.cpu.get_cpu_capability(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if not on_cpu:
        machine["device"] = torch.cuda.get_device_name(arguments.device)
    where = "CPU nanoseconds per token, one thread" if on_cpu else "nanoseconds per token, one GPU"
    result = {
        "what": f"{where}, KL, radius 0.05, float32",
        "command": "python tests/benchmarks/bench_operator.py"
        + ("" if on_cpu else f" --device {arguments.device}"),
        "machine": machine,
        "nanoseconds_per_token": times,
        "ratios": ratios(times, arguments.compiled_size),
        "ratios_at": arguments.compiled_size,
        "peak_tensors_two_sided_eager": temporaries(10**6, arguments.device),
    }
    print(json.dumps(result["ratios"], indent=2), result["peak_tensors_two_sided_eager"])
    if arguments.out:
        partial = arguments.out.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=2) + "\n")
        partial.replace(arguments.out)


if __name__ == "__main__":
    main()
