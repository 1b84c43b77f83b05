"""Data: local tables with the hub sets' schemas go through the code that the hub's would."""

import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace

import datasets
import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from bandpo import math_sets
from bandpo.base_models import smollm2
from bandpo.data import few_shot_sums, load_task
from bandpo.math_sets import MATH_SETS, MIXTURES, last_boxed, load_hub, load_math_sets, math_rows
from bandpo.pretrain import one_thread
from bandpo.rewards import answer_agrees, final_answer, first_line_is, is_readable, make_reward
from bandpo.tasks import EMBEDDED_TASKS

# One or more rows of each set, with the columns and types of the published schema.
ROWS = {
    "HuggingFaceH4/aime_2024": [
        {"id": 60, "problem": "P1", "solution": "s", "answer": "204", "url": "u", "year": "2024"}
    ],
    "yentinglin/aime_2025": [{"problem": "P2", "answer": "70"}],
    "MathArena/aime_2025": [{"problem_idx": 1, "problem": "P3", "answer": 70}],
    "math-ai/amc23": [
        {"id": 0, "question": "P4", "answer": "27.0"},
        {"id": 1, "question": "P5", "answer": "36"},
    ],
    "HuggingFaceH4/MATH-500": [
        {
            "problem": "P6",
            "solution": "s",
            "answer": r"\left( 3, \frac{\pi}{2} \right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "x",
        }
    ],
    "nlile/hendrycks-MATH-benchmark": [
        {"problem": "P7", "solution": "s", "answer": "5", "subject": "Algebra", "level": 2},
        {"problem": "P8", "solution": "s", "answer": "6", "subject": "Algebra", "level": 3},
        {"problem": "P9", "solution": "s", "answer": r"\frac{1}{2}", "subject": "A", "level": 5},
    ],
    "DigitalLearningGmbH/MATH-lighteval": [
        {"problem": "P10", "level": "Level 1", "solution": r"\boxed{1}", "type": "Algebra"},
        {
            "problem": "P11",
            "level": "Level 4",
            "solution": r"First \boxed{2}, so \boxed{\frac{3}{4}}.",
            "type": "Algebra",
        },
        {"problem": "P12", "level": "Level ?", "solution": r"\boxed{1}", "type": "Geometry"},
    ],
    "open-r1/DAPO-Math-17k-Processed": [{"prompt": "P13", "solution": "34", "data_source": "d"}],
    "BytedTsinghua-SIA/DAPO-Math-17k": [
        {
            "prompt": [{"role": "user", "content": f"Solve P{i % 2}. Answer: $Answer"}],
            "reward_model": {"ground_truth": str(10 + i % 2), "style": "rule"},
        }
        for i in range(200)
    ],
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Put every set on disk and let the table of sets point there instead of to the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in ROWS.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        spec = MATH_SETS[name]
        Dataset.from_list(rows).to_parquet(folder / f"{spec.split}.parquet")
        monkeypatch.setitem(math_sets.MATH_SETS, name, replace(spec, id=str(folder), config=None))
    return tmp_path


def test_every_listed_set_has_a_schema_here():
    assert set(ROWS) == set(MATH_SETS)
    for mixture in MIXTURES.values():
        assert set(mixture.split("+")) <= set(MATH_SETS)


@pytest.mark.parametrize("name", MATH_SETS)
def test_each_schema_is_read(hub, name):
    spec = math_sets.MATH_SETS[name]
    rows = math_rows(spec, load_hub(spec))
    assert rows.features == math_sets.COLUMNS
    assert set(rows["source"]) == {spec.id}
    for row in rows:
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert "Answer: $Answer" in message["content"]
        assert isinstance(row["answer"], str)
        assert answer_agrees(f"Thus it is so.\nAnswer: ${row['answer']}$", row["answer"])


def answers(spec_name):
    spec = math_sets.MATH_SETS[spec_name]
    return math_rows(spec, load_hub(spec))["answer"][:]


def test_gold_answers_are_tidied_and_rows_chosen(hub):
    assert answers("math-ai/amc23") == ["27", "36"]
    assert answers("MathArena/aime_2025") == ["70"]
    assert answers("nlile/hendrycks-MATH-benchmark") == ["6", r"\frac{1}{2}"]
    assert answers("DigitalLearningGmbH/MATH-lighteval") == [r"\frac{3}{4}"]
    assert answers("BytedTsinghua-SIA/DAPO-Math-17k") == ["10", "11"]


def test_published_mixture_by_name(hub):
    task = load_task("published_math", wrong_reward=-1.0, seed=3)
    assert sorted(task.train["answer"]) == sorted(["34", "6", r"\frac{1}{2}"])
    assert sorted(task.eval["answer"]) == ["204", "27", "36", "70"]
    assert len(set(task.eval["source"])) == 3
    assert task.max_completion_length == 4096
    reward = task.reward_funcs[0]
    say = [[{"role": "assistant", "content": t}] for t in ("Answer: 34", "Answer: 35", "34")]
    assert reward(prompts=[None] * 3, completions=say, answer=["34"] * 3) == [1.0, -1.0, -1.0]


def test_a_benchmark_alone_and_a_training_set_alone(hub):
    task = load_task("math-ai/amc23", eval_size=1)
    assert (len(task.train), len(task.eval)) == (0, 1)
    task = load_task("nlile/hendrycks-MATH-benchmark", eval_size=1)
    assert (len(task.train), len(task.eval)) == (1, 1)
    assert task.train["answer"][0] != task.eval["answer"][0]
    assert len(load_task("nlile/hendrycks-MATH-benchmark").eval) == 0


def test_missing_column_is_named_with_what_there_is():
    spec = MATH_SETS["HuggingFaceH4/aime_2024"]
    table = Dataset.from_dict({"question": ["P"], "answer": ["1"]})
    with pytest.raises(ValueError, match=r"lacks the column 'problem'; it has question, answer"):
        math_rows(spec, table)
    nested = Dataset.from_list([{"prompt": "P", "reward_model": {"style": "rule"}}])
    with pytest.raises(ValueError, match=r"lacks the column 'reward_model.ground_truth'"):
        math_rows(MATH_SETS["BytedTsinghua-SIA/DAPO-Math-17k"], nested)
    flat = Dataset.from_list([{"prompt": "P", "reward_model": "rule"}])
    with pytest.raises(ValueError, match=r"lacks the column 'reward_model.ground_truth'"):
        math_rows(MATH_SETS["BytedTsinghua-SIA/DAPO-Math-17k"], flat)
    level = Dataset.from_dict({"problem": ["P"], "answer": ["1"]})
    with pytest.raises(ValueError, match="lacks the column 'level'"):
        math_rows(MATH_SETS["nlile/hendrycks-MATH-benchmark"], level)


def test_empty_set_and_no_row_of_a_level():
    spec = MATH_SETS["HuggingFaceH4/aime_2024"]
    with pytest.raises(ValueError, match="has no rows"):
        math_rows(spec, Dataset.from_dict({"problem": [], "answer": []}))
    easy = Dataset.from_dict({"problem": ["P"], "answer": ["1"], "level": [1]})
    with pytest.raises(ValueError, match=r"has no rows.*with a level in \(3, 4, 5\)"):
        math_rows(MATH_SETS["nlile/hendrycks-MATH-benchmark"], easy)


@pytest.mark.parametrize("gold", ["", "  ", None, r"\frac{", "???"])
def test_a_benchmark_with_an_unreadable_answer_is_an_error(gold):
    spec = MATH_SETS["HuggingFaceH4/aime_2024"]
    table = Dataset.from_dict({"problem": ["P", "Q"], "answer": ["1", gold]})
    with pytest.raises(ValueError, match=r"1 of 2 answers of 'HuggingFaceH4/aime_2024'.*row 1"):
        math_rows(spec, table)


def test_a_training_set_loses_a_few_unreadable_rows_with_a_warning():
    spec = MATH_SETS["open-r1/DAPO-Math-17k-Processed"]
    table = Dataset.from_dict(
        {"prompt": [f"P{i}" for i in range(200)], "solution": ["???", *["7"] * 199]}
    )
    with pytest.warns(UserWarning, match=r"1 of 200 answers .* left out"):
        rows = math_rows(spec, table)
    assert len(rows) == 199
    with pytest.raises(ValueError, match="1 of 50 answers"):
        math_rows(spec, table.select(range(50)))


@pytest.mark.parametrize(
    ("solution", "boxed"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{a}{b^{2}}} done", r"\frac{a}{b^{2}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        ("none", ""),
        (r"\boxed{open", ""),
    ],
)
def test_last_boxed(solution, boxed):
    assert last_boxed(solution) == boxed


def offline(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_the_hub_the_error_says_what_to_do(tmp_path):
    done = offline(
        "from bandpo.data import load_task; load_task('HuggingFaceH4/aime_2024')",
        HF_HOME=str(tmp_path),
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ConnectionError: math set 'HuggingFaceH4/aime_2024'")
    assert "unset HF_HUB_OFFLINE" in last
    assert "file:PATH" in last


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            "Dataset 'x' is a gated dataset on the Hub. Visit the dataset page to ask for access.",
            PermissionError,
            "gated.*hf auth login",
        ),
        ("Dataset 'x' doesn't exist on the Hub or cannot be accessed.", ValueError, "not on the"),
    ],
)
def test_gated_and_missing_sets(monkeypatch, raised, error, message):
    """What `datasets` raises needs the hub, so its documented error is raised in its place."""

    def refuse(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError(raised)

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(error, match=message):
        load_math_sets([MATH_SETS["math-ai/amc23"]])


def test_wrong_split_or_configuration_is_named(hub):
    spec = math_sets.MATH_SETS["math-ai/amc23"]
    with pytest.raises(ValueError, match=r"split 'dev'.*cannot be loaded"):
        load_hub(replace(spec, split="dev"))
    with pytest.raises(ValueError, match=r"configuration hard.*cannot be loaded"):
        load_hub(replace(spec, config="hard"))


TABLE = {"prompt": ["1+1?", "1/2?", "2+2?"], "answer": ["2", r"\frac12", "4.0"], "more": [1, 2, 3]}


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet", "csv"])
def test_a_file_of_prompts_and_answers(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    table = Dataset.from_dict(TABLE)
    if suffix == "json":
        path.write_text(json.dumps([dict(row) for row in table]))
    else:
        getattr(table, {"jsonl": "to_json"}.get(suffix, f"to_{suffix}"))(path)
    task = load_task(f"file:{path}", eval_size=1, seed=5)
    assert (len(task.train), len(task.eval)) == (2, 1)
    rows = [*task.train, *task.eval]
    assert sorted(r["answer"] for r in rows) == ["2", "4", r"\frac12"]
    assert all(r["prompt"][0]["content"].endswith("?") for r in rows)
    half = next(r for r in rows if r["answer"] == r"\frac12")
    assert task.reward_funcs[0](
        completions=["So 0.5.\n**Answer:** 0.5"], **{"answer": [half["answer"]]}
    ) == [1.0]


def test_wrong_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        load_task("file:nowhere.json")
    with pytest.raises(ValueError, match=r"end in one of .json, .jsonl, .parquet, .csv"):
        load_task("file:mine.txt")
    (tmp_path / "torn.json").write_text('[{"prompt": "1+1?", "ans')
    with pytest.raises(ValueError, match="cannot be read as a table"):
        load_task(f"file:{tmp_path / 'torn.json'}")
    (tmp_path / "other.json").write_text('[{"question": "1+1?", "answer": "2"}]')
    with pytest.raises(ValueError, match="lacks the column 'prompt'; it has question, answer"):
        load_task(f"file:{tmp_path / 'other.json'}")
    (tmp_path / "bad.json").write_text('[{"prompt": "1+1?", "answer": "two?"}, {"prompt": "a"}]')
    with pytest.raises(ValueError, match=r"answers of .* cannot be read"):
        load_task(f"file:{tmp_path / 'bad.json'}")


def test_a_file_with_too_little_in_it(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="is empty; it needs rows"):
        load_task(f"file:{tmp_path / 'empty.jsonl'}")
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(ValueError, match="cannot be read as a table"):
        load_task(f"file:{tmp_path / 'none.json'}")
    rows = [f'{{"prompt": "1+{i}?", "answer": "{1 + i}"}}\n' for i in range(4)]
    (tmp_path / "four.jsonl").write_text("".join(rows))
    assert len(load_task(f"file:{tmp_path / 'four.jsonl'}", eval_size=3).train) == 1
    with pytest.raises(ValueError, match="must leave rows to train on: there are 4, got 4"):
        load_task(f"file:{tmp_path / 'four.jsonl'}", eval_size=4)


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match=r"scratchpad, .*few_shot_sums.*file:PATH; got 'gsm8k'"):
        load_task("gsm8k")


@pytest.mark.parametrize("name", [*EMBEDDED_TASKS, "few_shot_sums"])
def test_draws_are_deterministic_distinct_and_apart(name):
    a, b = (load_task(name, train_size=40, eval_size=20, seed=s) for s in (1, 2))
    again = load_task(name, train_size=40, eval_size=20, seed=1)
    assert a.train[:] == again.train[:]
    assert a.train["prompt"][:] != b.train["prompt"][:]
    assert a.eval[:] == b.eval[:]
    assert len(set(a.train["prompt"])) == 40
    everything = load_task(name)
    assert not set(everything.train["prompt"]) & set(everything.eval["prompt"])
    assert set(a.train["prompt"]) <= set(everything.train["prompt"])
    assert len(a.reward_funcs) == 1
    assert a.reward_funcs[0].__name__ == "correct"


def test_too_many_prompts_are_refused():
    with pytest.raises(ValueError, match=r"train_size must be between 0 and 2500.*got 2501"):
        load_task("scratchpad", train_size=2501)
    with pytest.raises(ValueError, match=r"eval_size must be between 0 and 625.*got -1"):
        load_task("scratchpad", eval_size=-1)
    with pytest.raises(ValueError, match="wrong_reward must be below 1"):
        load_task("scratchpad", wrong_reward=1.0)


def test_few_shot_sums_are_all_sums_and_right():
    train, held_out = few_shot_sums()
    rows = [*train, *held_out]
    assert len({r["prompt"] for r in rows}) == 90 * 90
    for row in rows[::97]:
        *shots, question = row["prompt"].split("\n")
        assert eval(question.removesuffix("=")) == int(row["answer"])
        assert all(eval(s.replace("=", "==")) for s in shots)
        assert first_line_is(f" {row['answer']}\n3 +", row["answer"])
        assert not first_line_is(f" {row['answer']}0\n", row["answer"])


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("steps\nAnswer: 42", "42"),
        ("Answer: 1\nno,\nAnswer: $\\frac{1}{2}$\n", "$\\frac{1}{2}$"),
        ("**Answer:** 42", "42"),
        ("**Answer: 42**", "42"),
        ("The answer is 42", None),
        ("", None),
    ],
)
def test_final_answer(completion, found):
    assert final_answer(completion) == found


@pytest.mark.parametrize(
    ("given", "gold", "right"),
    [
        ("42", "42", True),
        ("$42$", "42", True),
        ("42.", "42", True),
        (r"\boxed{42}", "42", True),
        (r"\(42\)", "42", True),
        (r"\$42", "42", True),
        ("1,000", "1000", True),
        ("0.5", r"\frac12", True),
        (r"\frac{2}{4}", r"\frac12", True),
        (r"\text{Evelyn}", r"\text{Evelyn}", True),
        ("(3, 4)", "(3,4)", True),
        ("43", "42", False),
        ("-42", "42", False),
        ("4242", "42", False),
        ("(4, 3)", "(3,4)", False),
        (r"\frac{", "42", False),
        ("", "42", False),
        ("I do not know", "42", False),
    ],
)
def test_answers_are_compared_by_value(given, gold, right):
    assert answer_agrees(f"Some work.\nAnswer: {given}", gold) is right


def test_reward_works_off_the_main_thread():
    """math-verify's time limit is an alarm, which only the main thread can set."""
    reward, found = make_reward(answer_agrees), []
    thread = threading.Thread(
        target=lambda: found.append(
            reward(completions=["Answer: 1/3", "Answer: 5"], answer=[r"\frac13", r"\frac13"])
        )
    )
    thread.start()
    thread.join()
    assert found == [[1.0, 0.0]]


def test_readable_means_a_value():
    assert all(map(is_readable, ["1", "x^2+1", r"\text{even}", "(1, 2)", "10:30"]))
    assert not any(map(is_readable, ["", "???", r"\frac{", "----"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["few_shot_sums", "file"])
def test_a_real_language_model_trains_on_it_through_trl(kind, tmp_path):
    """Raw text and conversations, one GRPO cycle of SmolLM2 each."""
    if kind == "file":
        path = tmp_path / "sums.json"
        path.write_text(json.dumps([{"prompt": f"{i} + 1?", "answer": i + 1} for i in range(4)]))
        task = load_task(f"file:{path}", wrong_reward=-1.0)
    else:
        task = load_task("few_shot_sums", train_size=4)
    config = GRPOConfig(
        str(tmp_path / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        max_steps=2,
        num_iterations=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        logging_steps=1,
    )
    trainer = GRPOTrainer(
        model=str(smollm2()),
        args=config,
        train_dataset=task.train,
        reward_funcs=task.reward_funcs,
    )
    with one_thread():
        trainer.train()
    reward = next(e["reward"] for e in trainer.state.log_history if "reward" in e)
    assert reward == -1.0 if kind == "file" else 0.0 <= reward <= 1.0
    assert all(math.isfinite(e["loss"]) for e in trainer.state.log_history if "loss" in e)
