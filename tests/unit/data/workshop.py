"""A folder with a toy target, source files and builds of data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chat_toys import CHATML, ToyTarget, toy_tokenizer

from dflash.config import Config
from dflash.data.answers import GenerateFn, InProcessAnswerer
from dflash.data.prepare import PreparedData, prepare_data
from dflash.data.reader import Sample, SampleStore
from dflash.data.sources import Progress

TOKENIZER = toy_tokenizer(CHATML)
VOCAB_SIZE = len(TOKENIZER)
STOP_IDS = (TOKENIZER.eos_token_id,)


class Workshop:
    """A folder with a target, source files and builds."""

    def __init__(self, folder: Path, target_dir: Path) -> None:
        self.folder = folder
        self.target_dir = target_dir
        self.target = ToyTarget(TOKENIZER)

    @property
    def data_root(self) -> Path:
        return self.folder / "runs" / "data"

    def corpus(self, *rows: Any, name: str = "a.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))
        return str(self.folder / name)

    def config(self, *files: str, mask: Any = None, **data: Any) -> Config:
        answers = {"regenerate": data.pop("regenerate", False), "max_new_tokens": 24, **data.pop("answers", {})}
        edges = {"bucket_edges_tokens": (24, 40, 80), "max_length_tokens": 80}
        tree = {
            "run": {"root": str(self.folder / "runs")},
            "target": {"path": str(self.target_dir), **(mask or {"mask_token": "<|mask|>"})},
            "data": {"source": "files", "files": files, "answers": answers, **edges, **data},
        }
        return Config.model_validate(tree)

    def prepare(
        self, config: Config, *, generate: GenerateFn | None = None, target: str = "t1", progress: Progress = lambda *_: None
    ) -> PreparedData:
        return prepare_data(
            config,
            tokenizer=TOKENIZER,
            vocab_size=VOCAB_SIZE,
            target_fingerprint=target,
            answerer=InProcessAnswerer(generate or self.target, batch_size=config.data.answers.batch_size, stop_ids=STOP_IDS),
            progress=progress,
        )

    def left_behind(self) -> set[str]:
        """Names in the folder of data sets."""
        return {path.name for path in self.data_root.iterdir()} - {".lock", "answers"} if self.data_root.exists() else set()

    def manifests(self) -> list[Path]:
        """Every committed version of every data set."""
        return sorted(self.data_root.glob("*/manifest*/*.json")) + sorted(self.data_root.glob("*/manifest.json"))


def samples_of(data: PreparedData, config: Config) -> list[Sample]:
    """All samples of a data set, by row."""
    with SampleStore(data.location, fingerprint=data.fingerprint, reader=config.data.reader) as store:
        return store.read(range(store.rows))


def rows(*prompts: str) -> list[dict[str, str]]:
    return [{"prompt": prompt, "completion": f"answer to {prompt}", "id": f"r{i}"} for i, prompt in enumerate(prompts)]


GOOD = rows("hi", "what is the weather", "and numbers", "talk about " + "the weather and " * 5)


def many_questions(place: Workshop) -> Config:
    """Forty questions that the target answers two at a time."""
    corpus = place.corpus(*({"prompt": f"{1 + i % 4} words"} for i in range(40)))
    return place.config(corpus, regenerate=True, answers={"batch_size": 2})
