"""The benchmark of the solvers: its contenders compute the same bounds."""

import sys

import numpy as np
import pytest
import torch

from bandpo.provenance import ROOT

sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

import bench_operator

SAME = (
    "table, both sides",
    "Newton, both sides",
    "generic, both sides",
    "bisection, 50 steps, both sides",
    "SciPy find_root, both sides",
)


def test_contenders_for_both_sides_agree():
    logp = bench_operator.sample_logp(400)
    logp = logp[(logp > -8) & (logp < -0.01)]  # bisection in the ratio is float32
    p = logp.double().exp().numpy()
    found = bench_operator.contenders(logp)
    ratios = {}
    for name in SAME:
        function, arguments, _ = found[name]
        lower, upper = (np.asarray(b, dtype=float) for b in function(*arguments))
        if name.startswith("SciPy"):  # probabilities
            lower, upper = lower / p, upper / p
        elif "bisection" not in name:  # logarithms of ratios
            lower, upper = np.exp(lower), np.exp(upper)
        ratios[name] = np.stack([lower, upper])
    for name in SAME:
        np.testing.assert_allclose(ratios[name], ratios["Newton, both sides"], 2e-3, 1e-6)


def test_times_are_positive_and_named():
    times = bench_operator.measure([500], compiled_size=0, budget=0.0)
    assert set(times) == set(bench_operator.contenders(bench_operator.sample_logp(5)))
    assert all(value > 0 for by_size in times.values() for value in by_size.values())


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_operator.py", "--device", "cuda"])
    with pytest.raises(SystemExit):
        bench_operator.main()
    assert "no GPU is here" in capsys.readouterr().err
