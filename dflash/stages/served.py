"""Evaluation through a server that runs the drafter (vLLM, SGLang), and the commands that start one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from dflash.config import Config, ServerConfig
from dflash.data.pointer import read_data_pointer
from dflash.data.prepare import load_data
from dflash.data.served_check import ServedTarget, probe_prompts
from dflash.data.served_protocol import Sampling
from dflash.data.tokenizer import Tokenizer, load_tokenizer, stop_token_ids
from dflash.errors import EvaluationError
from dflash.evaluate.decode import DecodeLimits
from dflash.evaluate.lossless import NearTie, explain_difference
from dflash.evaluate.prompts import EvalPrompt, load_eval_prompts, renderer_of
from dflash.evaluate.run import require_lossless
from dflash.evaluate.served import ServedQuestion, evaluate_served, served_answers
from dflash.evaluate.served_client import EngineName, ServedWants
from dflash.evaluate.served_launch import ServeCommands, ServedDrafter, serve_commands
from dflash.evaluate.served_write import write_served
from dflash.evaluate.stored import writing_alone
from dflash.evaluate.sweep_text import setting_text
from dflash.evaluate.text import clean_text
from dflash.evaluate.turns import follow_turns
from dflash.model.export_fields import DtypeName
from dflash.model.export_files import CONFIG_NAME as HF_CONFIG_NAME
from dflash.model.export_files import read_json
from dflash.model.sampling import GREEDY
from dflash.model.target import Target, load_target
from dflash.model.target_info import read_target_info
from dflash.records import EvaluationResult
from dflash.stages.evaluate import label_with, settings_of_call
from dflash.stages.export import check_described, stored_in
from dflash.stages.run import Run
from dflash.stages.sweep import load_sweep
from dflash.stages.tracking import close_again, tracker_of
from dflash.tracking import evaluation_metrics

Progress = Callable[[str, int, int], None]


def evaluate_served_stage(run: Run, *, engine: EngineName, url: str, plain_url: str | None, progress: Progress) -> EvaluationResult:
    """Measure a served drafter's acceptance on a run's held-out prompts.

    Args:
        run: an opened run; its data set must be prepared, its target need not be loadable here.
        engine: what serves.
        url: address of the server that speculates.
        plain_url: of one that does not, to judge losslessness by; None leaves that out.
        progress: called with (label, done, total).

    Returns:
        The result; also written to `eval/<engine>/` and logged to MLflow, or with settings of this call alone written beside that,
        and only its files logged. Figures that the engine does not tell are None.

    Raises:
        TargetError, ServerError: a server runs another model, or is away.
        EvaluationError: the figures do not belong to this evaluation, or there are none.
        NotLosslessError: speculative and plain answers differ beyond the near-tie rule.
    """
    config = run.config
    pointer = read_data_pointer(run.paths)
    data = load_data(pointer.location, fingerprint=pointer.fingerprint, verify="sizes")
    tokenizer = load_tokenizer(config.target)
    stop_ids = stop_token_ids(tokenizer, config.target)
    prompts = load_eval_prompts(config, tokenizer=tokenizer, manifest=data.manifest, store=data.store)
    question = _question(config, tokenizer, prompts, engine=engine, urls=(url, plain_url))
    if any(prompt.question is not None and prompt.question.later_turns for prompt in prompts):
        prompts = follow_turns(
            prompts,
            answer=lambda asked: served_answers(asked, question, progress=progress),
            renderer=renderer_of(config, tokenizer),
            stop_ids=stop_ids,
        )
        question = _question(config, tokenizer, prompts, engine=engine, urls=(url, plain_url))
    evaluation = evaluate_served(prompts, question, evaluate=config.evaluate, progress=progress)
    asked = settings_of_call(run, counted="server")
    folder = run.paths.eval_dir / label_with(engine, asked)
    with writing_alone(run.paths.eval_dir):
        files = write_served(evaluation, folder)
    tracker = tracker_of(run)
    if not asked:
        tracker.log_metrics(evaluation_metrics(evaluation.result), step=0)
    for file in files:
        tracker.log_artifact(file, f"eval/{folder.name}")
    close_again(run, tracker)
    require_lossless(evaluation.result)
    return evaluation.result


def _question(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[EvalPrompt], *, engine: EngineName, urls: tuple[str, str | None]
) -> ServedQuestion:
    """What is asked of the servers at the two addresses, and what they must be serving."""
    evaluate, server = config.evaluate, config.evaluate.server
    stop_ids = stop_token_ids(tokenizer, config.target)
    block_size = evaluate.block_size or config.drafter.block_size
    names = (server.model,) if server.model else tuple(dict.fromkeys((config.target.path, config.target.location)))
    target = ServedTarget(
        names=names,
        needed_tokens=max(len(prompt.prompt_ids) for prompt in prompts) + evaluate.max_new_tokens + block_size,
        tokenizer=tokenizer,
        probes=probe_prompts(tokenizer, config.data.template_flags),
        reference=None,
    )
    sampling = Sampling(names[0], evaluate.max_new_tokens, evaluate.temperature, evaluate.seed, stop_ids)
    patience = server.model_dump(include={"model", "api_key_env", "concurrency", "request_timeout_s", "max_retries", "backoff_s"})
    return ServedQuestion(
        engine=engine,
        server=ServerConfig(url=urls[0], **patience),
        plain_url=urls[1],
        wants=ServedWants(target, sampling, server.settle_s),
        expected_positions=block_size - 1,
        judge=_NearTies(config, stop_ids, block_size).judge if server.judge_differences else None,
    )


def serve_command_stage(run: Run, *, engine: EngineName) -> ServeCommands:
    """Commands that serve a run's target with its exported drafter.

    Args:
        run: an opened run.
        engine: which one.

    Raises:
        EvaluationError: there is no export, or the engine does not read it.
        DrafterError, RunStateError: the folder is no drafter, or one of another target.
    """
    folder = run.paths.export_dir
    if not folder.is_dir():
        raise EvaluationError(
            f"run {run.paths.root} has no exported drafter yet",
            remedy=f"finish the run, or export a checkpoint: python -m dflash export {run.paths.root} --output {folder}",
        )
    layout, config = stored_in(folder), folder / HF_CONFIG_NAME
    description = layout.describe(read_json(config), origin=str(config))
    info = read_target_info(run.config.target)
    check_described(description, info)
    served = ServedDrafter(str(folder), layout.name, description)
    commands = serve_commands(
        engine,
        served,
        target=run.config.target,
        block_size=run.config.evaluate.block_size,
        max_positions=info.max_position_embeddings,
        dtype=_served_dtype(run.config),
    )
    notes = [*commands.notes]
    if engine == "vllm":
        notes.append(
            "for the speed-up start both servers with --enable-per-request-metrics as well, and evaluate with "
            "--set evaluate.server.concurrency=1"
        )
    sweep = load_sweep(run.paths)
    if sweep is not None:
        best = setting_text(sweep.best)
        notes.append(f"in this process, on {clean_text(sweep.machine)}, step {sweep.step} was fastest with {best}")
    return dataclasses.replace(commands, notes=tuple(notes))


def _served_dtype(config: Config) -> DtypeName:
    """The target's dtype here: what the drafter was trained on is what it should see when it is served."""
    if config.target.dtype != "auto":
        return config.target.dtype
    return "float32" if config.cluster.device == "cpu" else "bfloat16"


class _NearTies:
    """Judges differing answers with the target, which is loaded when the first one comes."""

    def __init__(self, config: Config, stop_ids: tuple[int, ...], block_size: int) -> None:
        self._config = config
        self._limits = DecodeLimits(config.evaluate.max_new_tokens, frozenset(stop_ids))
        self._block_size = block_size
        self._target: Target | None = None

    def judge(self, prompt: EvalPrompt, plain: tuple[int, ...], speculative: tuple[int, ...]) -> NearTie:
        config = self._config
        if self._target is None:
            torch.set_num_threads(config.cluster.torch_threads)
            device = torch.device(config.cluster.device)
            self._target = load_target(config.target, target_layer_ids=config.drafter.target_layer_ids, device=device)
        return explain_difference(
            self._target,
            prompt.prompt_ids,
            answers=(plain, speculative),
            limits=self._limits,
            sampling=GREEDY,
            key=prompt.id,
            block_size=self._block_size,
            near_tie_factor=config.evaluate.near_tie_factor,
        )
