"""The model card of a published drafter: `README.md` with the hub's YAML header. Pure text; no files, no clock.

Invariant: every number is read from the run's own records, and every figure stands with its interval, its prompts and their hash,
the machine and the date. What was not measured is said to be so; nothing is claimed of engines that were never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash.config import Config
from dflash.model.export_fields import DtypeName, LayoutName
from dflash.records import CheckpointManifest, CheckResult, DataManifest, EvaluationResult, PromptSetEntry
from dflash.stages.card_text import front_matter, md, md_list, md_table

LIBRARIES: dict[LayoutName, str] = {"zlab": "dflash", "speculators": "speculators", "transformers": "transformers"}
TAGS = ("dflash", "speculative-decoding", "block-diffusion", "draft-model")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Everything that a card tells.

    Attributes:
        trained_tokens: tokens that the training has seen up to the checkpoint; None where the log does not say.
        sets: prompt sets of the evaluation, with their hashes.
        machine, measured_at: of the evaluation; empty where an older one did not note them.
        audit: results of the checks that the folder passed.
        serving: commands that serve the drafter, as shell lines; serving_notes: what they say of themselves.
        code: version of this project that exported it.
    """

    name: str
    license: str
    base_model: str
    layout: LayoutName
    dtype: DtypeName
    drafter_sha256: str
    parameters: int
    config: Config
    checkpoint: CheckpointManifest
    trained_tokens: int | None
    data: DataManifest
    result: EvaluationResult
    sets: Sequence[PromptSetEntry]
    machine: str
    measured_at: str
    audit: Sequence[CheckResult]
    serving: Sequence[str]
    serving_notes: Sequence[str]
    code: str


def model_card(facts: CardFacts) -> str:
    """The whole card."""
    header = front_matter(
        {
            "license": facts.license,
            "base_model": facts.base_model,
            "library_name": LIBRARIES[facts.layout],
            "pipeline_tag": "text-generation",
            "tags": list(dict.fromkeys((*TAGS, *facts.config.publish.tags))),
        }
    )
    sections = [
        header,
        f"# {md(facts.name)}\n\n{_opening(facts)}",
        f"## What it reaches\n\n{_figures(facts)}",
        f"## How to serve it\n\n{_serving(facts)}",
        f"## What it was trained on\n\n{_data(facts.data)}",
        f"## How it was trained\n\n{_training(facts)}",
        f"## What was checked\n\n{_audit(facts.audit)}",
        f"## Limits\n\n{_limits(facts)}",
    ]
    return "\n\n".join(sections) + "\n"


def _opening(facts: CardFacts) -> str:
    drafter = facts.config.drafter
    return (
        f"A DFlash drafter for {md(facts.base_model)}: it proposes {drafter.block_size - 1} tokens in one forward pass, and the "
        f"target verifies them together. It is no language model of its own: it reads hidden states of the target, and shares the "
        f"target's embedding and head. {facts.parameters:,} parameters, stored as {facts.dtype} ({facts.layout} layout)."
    )


def _figures(facts: CardFacts) -> str:
    result = facts.result
    rows: list[tuple[object, object]] = [
        ("acceptance length (target's own token counted)", _interval(result.acceptance_length, result.acceptance_ci, 2)),
        ("accepted drafts a verification", _number(result.accepted_length, 2)),
        ("mean over prompts", _number(result.acceptance_length_macro, 2)),
        ("speed-up over plain decoding", _interval(result.speedup, result.speedup_ci, 2)),
        ("same tokens as plain decoding", {True: "yes", False: "no", None: "not measured"}[result.lossless]),
        ("prompts that differ", "not measured" if result.differing_prompts is None else result.differing_prompts),
    ]
    if result.survival_per_position:
        rows.append(("accepted up to position 1, 2, ...", ", ".join(f"{share:.2f}" for share in result.survival_per_position)))
    setting = (
        f"Block size {result.block_size}, temperature {result.temperature:g}, {result.prompts} prompts, {result.verifications} "
        f"verifications, batch size {result.batch_size}; intervals at {result.confidence:.0%} by bootstrap over prompts. "
        f"Measured {md(facts.measured_at or 'at an unrecorded time')} on {md(facts.machine or 'an unrecorded machine')}. "
        f"Speed depends on that machine; acceptance on the prompts below."
    )
    heads = ("prompt set", "acceptance length", "prompts", "from", "SHA-256")
    sets = [(each.name, _of_set(result, each.name), each.prompts, each.origin, each.sha256) for each in facts.sets]
    parts = [md_table(("", ""), rows), setting, md_table(heads, sets)]
    return "\n\n".join([*parts, *(f"Note: {md(text)}" for text in result.warnings)])


def _of_set(result: EvaluationResult, name: str) -> str:
    """Acceptance length on one of the prompt sets: the pooled figure alone hides what several of them are worth."""
    part = result.slices.get("dataset", {}).get(name, {})
    low, high = part.get("acceptance_ci", (None, None))
    return _interval(part.get("acceptance_length"), None if low is None or high is None else (low, high), 2)


def _serving(facts: CardFacts) -> str:
    if not facts.serving:
        return "This layout is read by the DFlash generation of `transformers`; the zlab layout is the one for vLLM and SGLang."
    commands = [f"```sh\n{command}\n```" for command in facts.serving]
    notes = "\n".join(f"- {md(note)}" for note in facts.serving_notes)
    return "\n\n".join(["DRAFTER is this folder.", *commands, notes])


def _data(data: DataManifest) -> str:
    facts = {
        "samples": f"{data.samples:,}",
        "tokens": f"{data.tokens:,}, of which {data.supervised_tokens:,} supervised",
        "answers": "written by the target itself" if data.on_policy else "as the sources have them (not the target's)",
        "longest sample": f"{data.max_length_tokens} tokens",
        "chat template": f"SHA-256 {data.template_sha256}",
        "template flags": ", ".join(f"{key}={value}" for key, value in data.template_flags.items()) or "none",
        "rows set aside": sum(data.quarantined.values()),
        "data set fingerprint": data.fingerprint,
    }
    if data.answer_sampling:
        facts["how answers were sampled"] = ", ".join(f"{key}={value}" for key, value in data.answer_sampling.items())
    sources = [(each.label, f"{each.rows:,}", f"{each.samples:,}", each.sha256) for each in data.sources]
    return md_list(facts) + "\n\n" + md_table(("source", "rows", "samples", "SHA-256"), sources)


def _training(facts: CardFacts) -> str:
    config, train, drafter = facts.config, facts.config.train, facts.config.drafter
    anchors = train.anchors
    seen = "not recorded" if facts.trained_tokens is None else f"{facts.trained_tokens:,}"
    return md_list(
        {
            "drafter": f"{drafter.num_hidden_layers} layers, width {drafter.hidden_size}, block size {drafter.block_size}",
            "tapped target layers (0-based)": ", ".join(map(str, drafter.target_layer_ids)),
            "mask token id": facts.checkpoint.mask_token_id,
            "steps": f"{facts.checkpoint.step:,} (segment {facts.checkpoint.segment})",
            "tokens seen": seen,
            "tokens a step": f"at most {config.plan.tokens_per_batch * config.micro_batches_per_step:,}",
            "epochs in the plan": train.epochs,
            "objective": _objective(config),
            "anchors": f"{anchors.per_supervised_token:g} a supervised token, at most {anchors.max_per_sequence} a sequence",
            "optimizer": _optimizer(config),
            "learning rate": f"{train.lr:g}, {train.schedule}, warm-up {train.warmup_frac:.0%}, ends at {train.min_lr_frac:.0%}",
            "gradient norm clipped at": f"{train.clip_norm:g}",
            "seed": config.run.seed,
            "replicas": config.cluster.replicas,
            "checkpoint written": facts.checkpoint.created_at,
            "target fingerprint": facts.checkpoint.target_fingerprint,
            "drafter SHA-256": facts.drafter_sha256,
            "exported by": facts.code,
        }
    )


def _objective(config: Config) -> str:
    loss = config.train.loss
    details = {
        "decay": f"gamma {loss.gamma:g}",
        "dpace": f"alpha {loss.alpha:g}",
        "acceptance": f"gamma {loss.gamma:g}, eta {loss.eta:g}",
    }
    return f"{loss.objective} ({details[loss.objective]})"


def _optimizer(config: Config) -> str:
    optimizer = config.train.optimizer
    moments = f"betas {optimizer.beta1:g} and {optimizer.beta2:g}, weight decay {optimizer.weight_decay:g}"
    return (
        f"{optimizer.kind}, momentum {optimizer.momentum:g}, {moments}"
        if optimizer.kind == "muon"
        else f"{optimizer.kind}, {moments}"
    )


def _audit(audit: Sequence[CheckResult]) -> str:
    return md_table(("check", "found"), [(check.name, check.message) for check in audit])


def _limits(facts: CardFacts) -> str:
    longest = facts.data.max_length_tokens
    contexts = list(facts.result.slices.get("context_tokens", {}).values())
    measured = "no context length was measured by itself"
    if contexts:
        measured = f"the longest contexts measured here have {contexts[-1]['from_tokens']} to {contexts[-1]['to_tokens']} tokens"
    lines = (
        "It fits this one target, revision and vocabulary; with any other the text stays right and the acceptance is lost.",
        f"It was trained on samples of up to {longest} tokens; {measured}.",
        "Another chat template, thinking mode or domain than those above can lower the acceptance length by a lot.",
        "Decoding stays lossless with any drafter; a bad one costs speed, never correctness.",
        "The figures come from the decoder of the project that trained it; no serving engine was part of the measurement.",
    )
    return "\n".join(f"- {line}" for line in lines)


def _interval(value: float | None, interval: tuple[float, float] | None, digits: int) -> str:
    if value is None or interval is None:
        return _number(value, digits)
    return f"{value:.{digits}f} ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


def _number(value: float | None, digits: int) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
