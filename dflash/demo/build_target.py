"""Builds the demo target from nothing: `python -m dflash.demo.build_target --out DIR`.

Invariant: the folder appears whole or not at all (written beside, then renamed), holds an ordinary Hugging Face model,
and its `training_report.json` tells what it was trained on and what it can do.
The price: about half an hour on one core for the shipped recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

from dflash.data.synthetic import generate_conversations
from dflash.demo.examples import encode, length_batches, pool_seed, training_steps
from dflash.demo.recipe import SHIPPED_RECIPE, TargetRecipe, model_config
from dflash.demo.tokenizer import MAX_POSITIONS, save_tokenizer, train_tokenizer
from dflash.demo.training import exact_answers, train

logger = logging.getLogger(__name__)

REPORT_NAME = "training_report.json"


def grade(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, recipe: TargetRecipe) -> dict[str, Any]:
    """Return the exact-answer rates on held-out conversations, overall and per kind."""
    chats = list(generate_conversations(seed=recipe.seed, count=recipe.heldout_conversations, split="heldout"))
    batches = length_batches(encode(tokenizer, chats), batch_tokens=8192, pad_id=tokenizer.pad_token_id, end_weight=1.0)
    counts = exact_answers(model, batches)
    exact, total = (sum(pair[i] for pair in counts.values()) for i in range(2))
    return {
        "heldout_answers": total,
        "heldout_exact_frac": round(exact / total, 4),
        "heldout_exact_frac_by_kind": {kind: round(right / asked, 4) for kind, (right, asked) in counts.items()},
    }


def save_target(folder: Path, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, report: dict[str, Any]) -> None:
    """Write a Hugging Face folder with the report, replacing an older one only when the new one is complete."""
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(str(beside))
    save_tokenizer(tokenizer, beside)
    (beside / REPORT_NAME).write_text(json.dumps(report, indent=2) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    beside.rename(folder)


def build(recipe: TargetRecipe, *, out: Path, checkpoint_dir: Path | None) -> dict[str, Any]:
    """Train tokenizer and model by the recipe, write the folder `out`, and return the training report.

    With a checkpoint directory, graded intermediate targets are written to `step-N` folders in it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    started = time.monotonic()
    corpus = generate_conversations(seed=pool_seed(seed=recipe.seed, pool=0), count=recipe.tokenizer_conversations, split="train")
    tokenizer = train_tokenizer(corpus)
    config = model_config(
        recipe,
        vocab_size=len(tokenizer),
        max_positions=MAX_POSITIONS,
        pad_id=tokenizer.pad_token_id,
        end_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    logger.info("%d parameters, %d steps", model.num_parameters(), recipe.steps)

    def report(steps: int) -> dict[str, Any]:
        return {
            "recipe": dataclasses.asdict(recipe),
            "steps_done": steps,
            "parameters": model.num_parameters(),
            **grade(model, tokenizer, recipe=recipe),
            "wall_minutes": round((time.monotonic() - started) / 60, 1),
            "machine": f"{platform.machine()}, one thread, torch {torch.__version__}",
        }

    def on_checkpoint(step: int) -> None:
        if checkpoint_dir is not None:
            so_far = report(step)
            save_target(checkpoint_dir / f"step-{step}", model=model, tokenizer=tokenizer, report=so_far)
            logger.info("checkpoint %s: %s", checkpoint_dir / f"step-{step}", json.dumps(so_far))
            model.train()

    stream = training_steps(
        tokenizer,
        seed=recipe.seed,
        pool_conversations=recipe.pool_conversations,
        step_conversations=recipe.step_conversations,
        batch_tokens=recipe.batch_tokens,
        end_weight=recipe.end_weight,
    )
    conversations, tokens = train(model, stream, recipe=recipe, on_checkpoint=on_checkpoint)
    final = {**report(recipe.steps), "training_conversations": conversations, "training_padded_tokens": tokens}
    save_target(out, model=model, tokenizer=tokenizer, report=final)
    return final


def main() -> None:
    """Parse the command line, build the target, print the report as JSON."""
    parser = argparse.ArgumentParser(description="Build the demo target from nothing, deterministically, on one core.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write (replaced when the build succeeds)")
    parser.add_argument("--checkpoint-dir", type=Path, default=None, help="also write intermediate targets here")
    parser.add_argument("--seed", type=int, default=SHIPPED_RECIPE.seed, help="seed of weights and data")
    parser.add_argument("--steps", type=int, default=SHIPPED_RECIPE.steps, help="optimizer steps")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = dataclasses.replace(SHIPPED_RECIPE, seed=arguments.seed, steps=arguments.steps)
    print(json.dumps(build(recipe, out=arguments.out, checkpoint_dir=arguments.checkpoint_dir), indent=2))


if __name__ == "__main__":
    main()
