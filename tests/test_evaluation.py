"""Scores against exact fractions and brute force; intervals against coverage and scipy."""

import itertools
import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from bandpo.evaluation import (
    best_at_k_bootstrap,
    mean_at_k,
    pass_at_k,
    right_answers,
    sample_completions,
    sample_completions_vllm,
)
from bandpo.intervals import (
    interquartile_mean_interval,
    mean_interval,
    paired_comparison,
    proportion_interval,
)
from bandpo.pretrain import character_tokenizer
from bandpo.rewards import first_line_is, make_reward


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(*[st.integers(0, n)] * 2, st.just(n))))
def test_pass_at_k_is_the_exact_fraction(case):
    c, k, n = case[0], max(1, case[1]), case[2]
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k([c], k, n=n)[0] == pytest.approx(float(exact), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(k):
    rows = np.array(list(itertools.product((0, 1), repeat=6)))
    shares = [np.mean([max(s) for s in itertools.combinations(row, k)]) for row in rows]
    np.testing.assert_allclose(pass_at_k(rows, k), shares, rtol=1e-12, atol=1e-15)


@pytest.mark.claim("C14")
def test_one_success_in_32_scores_0638_with_replacement_and_1_without():
    assert best_at_k_bootstrap([1], 32, n=32)[0] == pytest.approx(0.638, abs=5e-4)
    assert pass_at_k([1], 32, n=32)[0] == 1.0


@pytest.mark.claim("C14")
def test_best_at_k_is_the_mean_over_all_draws_with_replacement():
    rows = np.array(list(itertools.product((0, 1), repeat=4)))
    for k in (1, 2, 3, 5):
        shares = [np.mean([max(d) for d in itertools.product(row, repeat=k)]) for row in rows]
        np.testing.assert_allclose(best_at_k_bootstrap(rows, k), shares, rtol=1e-12, atol=1e-15)


@given(st.lists(st.integers(0, 16), min_size=1, max_size=8), st.integers(1, 16))
def test_with_replacement_never_scores_higher(counts, k):
    assert (best_at_k_bootstrap(counts, k, n=16) <= pass_at_k(counts, k, n=16) + 1e-12).all()


def test_mean_at_k_and_agreement_at_k_1():
    rows = np.random.default_rng(0).integers(0, 2, (20, 8))
    np.testing.assert_allclose(mean_at_k(rows), rows.mean(axis=1))
    np.testing.assert_allclose(mean_at_k(rows.sum(axis=1), n=8), rows.mean(axis=1))
    for score in (pass_at_k, best_at_k_bootstrap):
        np.testing.assert_allclose(score(rows, 1), rows.mean(axis=1), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(score(rows.sum(axis=1), 3, n=8), score(rows, 3))


@pytest.mark.claim("C14")
def test_pass_at_k_is_unbiased_and_best_at_k_is_not():
    """Over all outcomes of n Bernoulli samples, weighed by their chance."""
    n, k, p = 10, 6, 0.07
    counts = np.arange(n + 1)
    chance = stats.binom.pmf(counts, n, p)
    truth = 1 - (1 - p) ** k
    assert chance @ pass_at_k(counts, k, n=n) == pytest.approx(truth, rel=1e-12)
    assert chance @ best_at_k_bootstrap(counts, k, n=n) < truth - 0.02


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k([[0, 2]], 1), "0/1 array"),
        (lambda: pass_at_k([3, 1], 1), "counts with n given"),
        (lambda: pass_at_k([5], 1, n=4), "between 0 and n = 4"),
        (lambda: pass_at_k([-1], 1, n=4), "between 0 and n = 4"),
        (lambda: pass_at_k([0.5], 1, n=4), "whole counts"),
        (lambda: pass_at_k([1], 5, n=4), "k must be between 1 and the 4 samples; got 5"),
        (lambda: pass_at_k([1], 0, n=4), "k must be between"),
        (lambda: best_at_k_bootstrap([1], 0, n=4), "k must be at least 1"),
        (lambda: mean_at_k(np.zeros((0, 3))), "0/1 array"),
        (lambda: mean_interval([1.0]), "values must be at least two"),
        (lambda: mean_interval([1.0, math.nan]), "finite"),
        (lambda: paired_comparison([1, 2], [1, 2, 3]), "pair up; got 2 and 3"),
        (lambda: interquartile_mean_interval([[1.0]]), "at least 2 runs"),
        (lambda: interquartile_mean_interval([]), "at least 2 runs"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("n", [3, 5, 40])
def test_mean_interval_covers_at_its_level(n):
    """The true mean is inside 90 of 100 times, with few values as with many."""
    rows = np.random.default_rng(1).normal(3.0, 1.0, (2000, n))
    found = [mean_interval(row, confidence=0.9) for row in rows]
    assert np.mean([i.low <= 3.0 <= i.high for i in found]) == pytest.approx(0.9, abs=0.02)


def test_mean_interval_is_that_of_the_textbook():
    # Student's own sleep data, drug 2 less drug 1, and t of 9 degrees of freedom, 2.262
    extra = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    i = mean_interval(extra)
    half = 2.262157 * np.std(extra, ddof=1) / math.sqrt(10)
    assert (i.value, i.low, i.high) == pytest.approx((1.58, 1.58 - half, 1.58 + half))


def test_an_interval_is_cut_to_what_the_mean_can_be():
    x = [0.9, 1.0, 1.0, 1.0]
    free, cut = mean_interval(x), mean_interval(x, within=(0.0, 1.0))
    assert free.high > 1.0 == cut.high
    assert (cut.value, cut.low) == (free.value, free.low)
    constant = mean_interval([2.0, 2.0, 2.0])
    assert (constant.low, constant.value, constant.high) == (2.0, 2.0, 2.0)


def test_wilson_interval_against_its_formula():
    n, c, z = 50, 3, stats.norm.ppf(0.975)
    p = c / n
    center = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    i = proportion_interval(c, n)
    assert (i.value, i.low, i.high) == pytest.approx((p, center - half, center + half))


def test_interquartile_mean_ignores_the_outer_quarters_and_keeps_axes():
    runs = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [99.0, 1.0]])
    value, low, high = interquartile_mean_interval([runs])
    np.testing.assert_allclose(value, [1.5, 1.0])
    assert value.shape == low.shape == high.shape == (2,)
    assert (low <= value).all()
    assert (value <= high).all()
    assert high[0] > low[0]


def test_bootstrap_of_the_interquartile_mean_is_stratified():
    """Two constant strata cannot vary if runs are drawn within strata; pooled draws would."""
    value, low, high = interquartile_mean_interval([np.zeros(5), np.ones(5)])
    assert value == low == high == pytest.approx(0.5)


def test_interquartile_interval_equals_a_plain_loop():
    x = np.random.default_rng(3).random((9, 1))
    _, low, high = interquartile_mean_interval([x], resamples=20_000, confidence=0.9)
    rng = np.random.default_rng(7)
    means = [stats.trim_mean(rng.choice(x[:, 0], 9), 0.25) for _ in range(20_000)]
    assert (low[0], high[0]) == pytest.approx(np.quantile(means, [0.05, 0.95]), abs=0.01)


def test_paired_comparison_sees_what_pairing_shows():
    """Seeds differ a lot, the settings by little but always: only pairing finds it."""
    rng = np.random.default_rng(0)
    seeds = rng.normal(0, 1, 8)
    a, b = seeds + 0.05 + rng.normal(0, 0.01, 8), seeds
    found = paired_comparison(a, b)
    assert found.p_value == pytest.approx(2 / 2**8)
    assert found.wins == 1.0
    assert found.pairs == 8
    assert found.difference.value == pytest.approx(np.mean(a - b))
    assert found.difference.low > 0
    assert found.effect_size == pytest.approx(np.mean(a - b) / np.std(a - b, ddof=1))
    swapped = paired_comparison(b, a)
    assert swapped.difference.value == pytest.approx(-found.difference.value)
    assert swapped.p_value == found.p_value
    assert swapped.wins == 0.0


def test_paired_p_value_is_that_of_all_sign_flips():
    d = np.array([0.3, -0.1, 0.4, 0.2, 0.05])
    flips = [abs(np.mean(d * s)) for s in itertools.product((1, -1), repeat=5)]
    exact = np.mean(np.array(flips) >= abs(d.mean()) - 1e-12)
    assert paired_comparison(d, np.zeros(5)).p_value == pytest.approx(exact)


def test_equal_settings_show_nothing():
    found = paired_comparison([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (found.difference.value, found.effect_size, found.wins) == (0.0, 0.0, 0.5)
    assert found.p_value == 1.0
    assert paired_comparison([2.0, 3.0], [1.0, 2.0]).effect_size == math.inf


@pytest.fixture(scope="module")
def random_model():
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def test_sampling_follows_the_models_probabilities(random_model):
    """First tokens of prompts of two lengths, so that padding is in play, against the softmax."""
    model, tokenizer = random_model
    model.eval()
    prompts, n = ["12=", "30142="], 4000
    rows = sample_completions(model, tokenizer, prompts, n, max_new_tokens=1, batch_size=8000)
    for prompt, row in zip(prompts, rows, strict=True):
        with torch.no_grad():
            p = model(tokenizer(prompt, return_tensors="pt").input_ids).logits[0, -1].softmax(-1)
        for token, chance in zip(tokenizer.convert_ids_to_tokens(range(len(p))), p, strict=True):
            if token not in tokenizer.all_special_tokens:
                chance = float(chance)
                margin = 5 * math.sqrt(chance * (1 - chance) / n)
                assert row.count(token) / n == pytest.approx(chance, abs=margin)


def test_sampling_depends_on_its_seed_alone(random_model):
    model, tokenizer = random_model
    model.train()

    def draw(seed):
        return sample_completions(model, tokenizer, ["12=", "3="], 3, max_new_tokens=6, seed=seed)

    first, state = draw(1), torch.get_rng_state()
    assert [len(row) for row in first] == [3, 3]
    assert draw(1) == first != draw(2)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_right_answers_keep_problem_and_sample(wrong):
    texts = [[" 5\n", "6", "5 5"], ["7", "7\n8", "5"]]
    right = right_answers(texts, ["5", "7"], make_reward(first_line_is, wrong))
    assert right.tolist() == [[True, False, False], [True, True, False]]
    assert mean_at_k(right).tolist() == pytest.approx([1 / 3, 2 / 3])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        right_answers(texts, ["5"], make_reward(first_line_is, wrong))


def test_messages_go_through_the_chat_template(random_model):
    model, tokenizer = random_model
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    messages = [{"role": "user", "content": "12"}]

    def draw(prompt):
        return sample_completions(model, tokenizer, [prompt], 4, max_new_tokens=5)

    assert draw(messages) == draw("12=")


def test_vllm_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match="needs vLLM and a GPU"):
        sample_completions_vllm("model", ["1"], 2, max_new_tokens=3)
