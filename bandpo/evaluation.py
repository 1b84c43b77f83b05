"""Sampling completions, scoring them (mean@k, pass@k, the published best@k), and keeping both.

Scores come one per problem: a benchmark's figure is their mean, and its uncertainty comes from
:func:`bandpo.intervals.mean_interval` over problems.

Everywhere ``correct`` is either a 0/1 array ``(problems, samples)`` or, with ``n`` given, the
number of right samples of each problem, ``(problems,)``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bandpo.runs import FINISHED, write_json, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from bandpo.data import TaskData

Prompt = str | list[dict[str, str]]
Texts = Sequence[Sequence[str]]
Floats = NDArray[np.float64]


@torch.no_grad()
def sample_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    n: int,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch_size: int = 512,
    seed: int = 0,
) -> list[list[str]]:
    """Sample ``n`` completions of each prompt with transformers.

    Parameters
    ----------
    model, tokenizer
        As their ``from_pretrained`` loads them; the model may be on any device.
    prompts : sequence of str or of messages
        Messages go through the tokenizer's chat template.
    n : int
        Completions of each prompt.
    max_new_tokens : int
        Longest completion in tokens.
    temperature, top_p : float
        Of the sampling; the published runs evaluate at 1 and 1. No top-k cut is made.
    batch_size : int
        Sequences at once. On one machine, the same batch size and seed give the same samples.
    seed : int
        Seeds torch for this call only.

    Returns
    -------
    list of list of str
        ``n`` texts for each prompt, special tokens left out.
    """
    texts = [text for p in prompts for text in [_as_text(p, tokenizer)] * n]
    completions: list[str] = []
    training = model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(texts), batch_size):
            batch = tokenizer(
                texts[start : start + batch_size],
                return_tensors="pt",
                padding=True,
                padding_side="left",
                add_special_tokens=False,
            )
            ids = batch["input_ids"].to(model.device)
            out = model.generate(  # type: ignore[operator]  # torch types it as a buffer
                input_ids=ids,
                attention_mask=batch["attention_mask"].to(model.device),
                do_sample=True,
                temperature=temperature,
                top_p=top_p,
                top_k=0,
                max_new_tokens=max_new_tokens,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            completions += tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    model.train(training)
    return [completions[i : i + n] for i in range(0, len(completions), n)]


def sample_completions_vllm(
    model: str,
    prompts: Sequence[Prompt],
    n: int,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    **engine: Any,
) -> list[list[str]]:
    """Sample ``n`` completions of each prompt with vLLM, for GPUs.

    Parameters
    ----------
    model : str
        Hub id or folder of the model.
    prompts, n, max_new_tokens, temperature, top_p, seed
        As for :func:`sample_completions`.
    **engine
        Passed to ``vllm.LLM``, for example ``tensor_parallel_size=8``.

    Returns
    -------
    list of list of str

    Raises
    ------
    ModuleNotFoundError
        If vLLM is not installed.
    """
    try:
        from vllm import LLM, SamplingParams
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "sample_completions_vllm needs vLLM and a GPU (`pip install vllm`); "
            "sample_completions does the same with transformers"
        ) from error
    llm = LLM(model=model, seed=seed, **engine)
    tokenizer = llm.get_tokenizer()
    outputs = llm.generate(
        [_as_text(p, tokenizer) for p in prompts],
        SamplingParams(
            n=n, max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
        ),
    )
    return [[completion.text for completion in output.outputs] for output in outputs]


def right_answers(
    texts: Texts, answers: Sequence[str], reward: Callable[..., list[float]]
) -> NDArray[np.bool_]:
    """Mark which sampled completions are right.

    Parameters
    ----------
    texts : sequence of sequence of str
        As many completions of each problem, as :func:`sample_completions` returns them.
    answers : sequence of str
        Gold answer of each problem.
    reward : callable
        ``(completions, answers) -> rewards``, 1 for a right one: see
        :func:`bandpo.rewards.make_reward`.

    Returns
    -------
    ndarray of bool (problems, samples)
    """
    flat = [text for row in texts for text in row]
    gold = [answer for row, answer in zip(texts, answers, strict=True) for _ in row]
    return np.reshape(np.equal(reward(flat, gold), 1), (len(texts), -1))


def finish_run(
    run_dir: str | Path, data: TaskData, before: Texts, after: Texts, **facts: Any
) -> None:
    """Write what a run's models answered to the held-out prompts, and with it that it is finished.

    Parameters
    ----------
    run_dir : str or Path
        Folder of the run.
    data : TaskData
        The task; its held-out prompts are the ones that were answered.
    before, after : sequence of sequence of str
        As many completions of each held-out prompt, of the base and of the trained model.
    **facts
        JSON values to be kept beside the counts of right answers: ``seconds`` of training,
        ``resumed``.
    """
    (reward,) = data.reward_funcs
    prompts, answers = data.eval["prompt"], data.eval["answer"]
    right = {
        f"right_{when}": right_answers(texts, answers, reward).sum(axis=1).tolist()
        for when, texts in (("before", before), ("after", after))
    }
    rows = [
        {"prompt": p, "answer": a, "before": b, "after": c}
        for p, a, b, c in zip(prompts, answers, before, after, strict=True)
    ]
    folder = Path(run_dir)
    write_text(folder / "completions.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / FINISHED, {"samples": len(before[0]), **right, **facts})


def mean_at_k(correct: ArrayLike, n: int | None = None) -> Floats:
    """Return the share of right samples of each problem; the mean over problems is mean@k.

    Parameters
    ----------
    correct, n
        See the module's description.

    Returns
    -------
    ndarray (problems,)
    """
    c, n = _counts(correct, n)
    return c / n


def pass_at_k(correct: ArrayLike, k: int, n: int | None = None) -> Floats:
    """Estimate, for each problem, the chance that at least one of k samples is right.

    The estimate 1 - C(n - c, k) / C(n, k), with c right ones of n samples, is unbiased for k fresh
    samples [1]_. It is computed as a product, which neither overflows nor cancels.

    Parameters
    ----------
    correct, n
        See the module's description.
    k : int
        From 1 to n.

    Returns
    -------
    ndarray (problems,)
        1 where fewer than k samples are wrong.

    References
    ----------
    .. [1] M. Chen et al., "Evaluating Large Language Models Trained on Code", 2021,
       arXiv:2107.03374.
    """
    c, n = _counts(correct, n)
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the {n} samples; got {k}")
    drawn = np.arange(k)  # the i-th draw without replacement is wrong: (n - c - i) / (n - i)
    wrong = np.clip(n - c[:, None] - drawn, 0, None) / (n - drawn)
    return 1.0 - wrong.prod(axis=1)


def best_at_k_bootstrap(correct: ArrayLike, k: int, n: int | None = None) -> Floats:
    """Return the published pipeline's "best@k" of each problem: k draws *with* replacement.

    Its expectation is 1 - (1 - c/n)^k, given here exactly instead of by random draws. It is the
    plug-in estimate, below :func:`pass_at_k`: one right sample of 32 scores 0.638 at k = 32, where
    pass@32 is 1.

    Parameters
    ----------
    correct, n
        See the module's description.
    k : int
        At least 1.

    Returns
    -------
    ndarray (problems,)
    """
    c, n = _counts(correct, n)
    if k < 1:
        raise ValueError(f"k must be at least 1; got {k}")
    return 1.0 - (1.0 - c / n) ** k


def _as_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def _counts(correct: ArrayLike, n: int | None) -> tuple[NDArray[np.int64], int]:
    """Bring either form of ``correct`` to counts of right samples and the number of samples."""
    c = np.asarray(correct)
    if n is None:
        if c.ndim != 2 or c.size == 0 or not np.isin(c, (0, 1)).all():
            raise ValueError(
                "correct must be a 0/1 array (problems, samples), or counts with n given; "
                f"got shape {c.shape}"
            )
        return c.astype(np.int64).sum(axis=1), c.shape[1]
    if c.ndim != 1 or n < 1 or (c < 0).any() or (c > n).any() or (c != np.rint(c)).any():
        raise ValueError(f"correct must be whole counts between 0 and n = {n}; got {c}")
    return c.astype(np.int64), n
