"""Write the recipes of bandpo/recipes: TRL reads flat YAML files without includes.

Run ``python tools/recipes.py`` after a change here; a test compares the files with this script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).parents[1] / "bandpo" / "recipes"

MODELS = {
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "r1-qwen-1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "r1-qwen-7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "r1-llama-8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
}

RULES: dict[str, dict[str, Any]] = {
    "grpo": {"clip_rule": "fixed", "epsilon": 0.2, "epsilon_high": 0.2},
    "clip-higher": {"clip_rule": "fixed", "epsilon": 0.2, "epsilon_high": 0.28},
    "dcpo": {"clip_rule": "dcpo", "epsilon": 0.16, "epsilon_high": 0.2},
    "kl-band": {"clip_rule": "band", "band_divergence": "kl", "band_radius": 0.05},
    "tv-band": {"clip_rule": "band", "band_divergence": "tv", "band_radius": 0.05},
    "chi2-band": {"clip_rule": "band", "band_divergence": "chi2", "band_radius": 0.05},
    "relaxed-band": {
        "clip_rule": "relaxed_band",
        "band_divergence": "kl",
        "band_radius": 0.05,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
    },
}

# The mean radius of kl-band, and more of it where the old policy's entropy is high.
ADAPTIVE = {
    "clip_rule": "adaptive_band",
    "band_divergence": "kl",
    "band_radius": 0.05,
    "band_signal": "entropy",
    "band_adaptivity": 0.5,
}

CAPPED = {"band_max_ratio": 10.0, "delta": 10.0}  # delta: dual clipping of negative advantages

LOGGING = {
    "logging_steps": 1,
    "save_total_limit": 2,
    "resume_from_checkpoint": "auto",
    "seed": 1,
}

# 256 prompts x 16 completions a generation = 8 x 8 x 64; 1,024 completions an update = 8 x 8 x 16.
PUBLISHED = {
    "task": "published_math",
    "wrong_reward": -1.0,
    "processes": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 16,
    "steps_per_generation": 64,
    "num_generations": 16,
    "num_iterations": 1,
    "max_steps": 4080,
    "max_completion_length": 4096,
    "temperature": 1.0,
    "top_p": 1.0,
    "loss_type": "grpo",
    "beta": 0.001,
    "use_bias_correction_kl": False,
    "scale_rewards": "group",
    "learning_rate": 1.0e-6,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "bf16": True,
    "gradient_checkpointing": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 5120,
    "vllm_importance_sampling_correction": False,
    "eval_strategy": "steps",
    "eval_steps": 20,
    "num_generations_eval": 32,
    "per_device_eval_batch_size": 32,
    "save_steps": 100,
    **LOGGING,
}

ONE_GPU = {
    "task": "math",
    "eval_size": 100,
    "processes": 1,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "num_generations": 8,
    "num_iterations": 2,
    "max_steps": 800,
    "max_completion_length": 1024,
    "loss_type": "grpo",
    "beta": 0.0,
    "learning_rate": 1.0e-6,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "bf16": True,
    "gradient_checkpointing": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 2048,
    "eval_strategy": "steps",
    "eval_steps": 80,
    "num_generations_eval": 4,
    "per_device_eval_batch_size": 64,
    "save_steps": 80,
    **LOGGING,
}

PUBLISHED_HEAD = """\
# A published run in TRL's terms, on 8 GPUs of 141 GB:
#   accelerate launch --config_file bandpo/recipes/accelerate/fsdp2.yaml -m bandpo.train \\
#     --config bandpo/recipes/{path}
#   python -m bandpo.evaluate {output} --vllm
# A second seed: --seed 2 --output_dir {cell}-2
# The summary of all runs of this model: make record PROFILE={profile}
# Written by tools/recipes.py. Not run here.
"""

ONE_GPU_HEAD = """\
# MATH levels 3-5 on one GPU of 24 GB or more, without an accelerate configuration:
#   python -m bandpo.train --config bandpo/recipes/{path}
#   python -m bandpo.evaluate {output} --vllm
# Other rules and seeds by flags, for example
#   --clip_rule fixed --seed 2 --output_dir {folder}/grpo-2
# The summary of all runs of this model: make record PROFILE={profile}
# Written by tools/recipes.py. Not run here.
"""


def recipes() -> dict[str, str]:
    """Return the text of every recipe by its path under ``bandpo/recipes``."""
    texts = {}
    for model, hub_id in MODELS.items():
        for rule, fields in RULES.items():
            path = f"published/{model}/{rule}.yaml"
            head = {"model_name_or_path": hub_id, "output_dir": output_dir(model, rule)}
            texts[path] = _text(PUBLISHED_HEAD, path, head | fields | CAPPED | PUBLISHED)
    for size in ("0.5b", "1.5b"):
        path = f"one_gpu/qwen2.5-{size}.yaml"
        head = {
            "model_name_or_path": f"Qwen/Qwen2.5-{size.upper()}-Instruct",
            "output_dir": output_dir(f"qwen2.5-{size}", "kl-band"),
        }
        texts[path] = _text(ONE_GPU_HEAD, path, head | RULES["kl-band"] | CAPPED | ONE_GPU)
    path = "one_gpu/qwen2.5-0.5b-adaptive-band.yaml"
    head = {
        "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
        "output_dir": output_dir("qwen2.5-0.5b", "adaptive-band"),
    }
    texts[path] = _text(ONE_GPU_HEAD, path, head | ADAPTIVE | CAPPED | ONE_GPU)
    return texts


def output_dir(model: str, rule: str) -> str:
    """Return a run's folder: one folder a model, as of a profile, and in it RULE-SEED."""
    return f"build/runs/{model}/{rule}-{LOGGING['seed']}"


def _text(head: str, path: str, fields: dict[str, Any]) -> str:
    output = Path(fields["output_dir"])
    head = head.format(
        path=path,
        output=output,
        folder=output.parent,
        cell=str(output).removesuffix(f"-{fields['seed']}"),
        profile=output.parent.name,
    )
    return head + yaml.safe_dump(fields, sort_keys=False)


if __name__ == "__main__":
    for path, text in recipes().items():
        (RECIPES / path).parent.mkdir(parents=True, exist_ok=True)
        (RECIPES / path).write_text(text, encoding="utf-8")
