"""The published layouts side by side: how each writes and reads its configuration and what it calls the tensors.

Invariant: a folder's layout is recognised by a key that only this layout has, never guessed from what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash.errors import DrafterError
from dflash.model import export_transformers
from dflash.model.export_config import read_zlab, zlab_config
from dflash.model.export_fields import DrafterDescription, DtypeName, LayoutName
from dflash.model.export_speculators import read_speculators, speculators_config
from dflash.model.export_transformers import read_transformers, transformers_config
from dflash.model.parameters import drafter_shapes

TABLE_NAMES = ("embed_tokens.weight", "lm_head.weight")
"""The target's embedding and head, where a layout stores copies of them."""
VOCABULARY_MAPS = ("d2t", "t2d")
"""Maps between a draft vocabulary and the target's, where a layout stores them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One published layout.

    Attributes:
        write: description -> `config.json`; read: the way back.
        tensor_names: our name -> the file's, where they differ.
        stores_tables: exports hold the target's embedding and head; on import they may be absent.
    """

    name: LayoutName
    write: Callable[..., dict[str, Any]]
    read: Callable[..., DrafterDescription]
    tensor_names: Mapping[str, str]
    stores_tables: bool

    def file_name(self, name: str) -> str:
        """What the file calls one of our tensors."""
        return self.tensor_names.get(name, name)

    def config(self, description: DrafterDescription, *, dtype: DtypeName) -> dict[str, Any]:
        """The layout's `config.json`."""
        return self.write(description, dtype=dtype)

    def describe(self, raw: Mapping[str, Any], *, origin: str) -> DrafterDescription:
        """The description that a `config.json` of this layout holds."""
        return self.read(raw, origin=origin)

    def shapes(self, description: DrafterDescription) -> dict[str, tuple[int, ...]]:
        """File names and shapes of the drafter's own tensors."""
        wanted = drafter_shapes(description.config, target_hidden_size=description.target_hidden_size)
        return {self.file_name(name): shape for name, shape in wanted.items()}

    def table_shapes(self, description: DrafterDescription) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the stored copies of the target's tables; empty where the layout has none."""
        shape = (description.vocab_size, description.config.hidden_size)
        return dict.fromkeys(TABLE_NAMES, shape) if self.stores_tables else {}


LAYOUTS: dict[LayoutName, Layout] = {
    "zlab": Layout("zlab", zlab_config, read_zlab, {}, stores_tables=False),
    "speculators": Layout("speculators", speculators_config, read_speculators, {}, stores_tables=True),
    "transformers": Layout(
        "transformers", transformers_config, read_transformers, export_transformers.TENSOR_NAMES, stores_tables=False
    ),
}


def layout_of(raw: Mapping[str, Any], *, origin: str) -> Layout:
    """Recognise the layout of a `config.json`.

    Raises:
        DrafterError: it is none of those that are known.
    """
    if "speculators_model_type" in raw:
        return LAYOUTS["speculators"]
    if raw.get("model_type") == export_transformers.MODEL_TYPE:
        return LAYOUTS["transformers"]
    if "dflash_config" in raw:
        return LAYOUTS["zlab"]
    raise DrafterError(
        f"{origin} lacks 'dflash_config' and every other mark of a drafter ({', '.join(LAYOUTS)})",
        remedy="give the folder of a published DFlash drafter",
    )
