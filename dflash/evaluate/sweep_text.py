"""A sweep as a table for people: one block a temperature, one row a block size, one column a batch size."""

from __future__ import annotations

from dflash.evaluate.text import aligned, clean_text
from dflash.records import SweepCell, SweepResult


def sweep_table(result: SweepResult) -> str:
    """The sweep in plain text: tokens/s and speed-up of every cell, the best setting, and how to use it."""
    step = "" if result.step is None else f" at step {result.step}"
    asked = f"{result.prompts} prompts of {clean_text(result.dataset)}, up to {result.max_new_tokens} tokens each"
    lines = [
        f"{clean_text(result.drafter)}{step}: {asked}",
        "tokens/s over all rows, prefill left out (speed-up over plain decoding at the same batch size)",
        "* fastest of its column    ~ not shown to be slower than that    ! not lossless",
    ]
    for temperature in dict.fromkeys(cell.temperature for cell in result.cells):
        lines += ["", f"temperature {temperature:g}", *_block(result, temperature)]
    return "\n".join([*lines, "", *_best(result)])


def setting_text(cell: SweepCell) -> str:
    """A way of decoding in words."""
    drafts = "plain decoding" if cell.block_size == 1 else f"block size {cell.block_size}"
    return f"{drafts}, batch size {cell.batch_size}, temperature {cell.temperature:g}"


def gain_text(cell: SweepCell) -> str:
    """What it gives, with intervals where there are any."""
    return f"{cell.tokens_per_s:.0f} tokens/s{_ends(cell.tokens_per_s_ci, 0)}, {cell.speedup:.2f}x plain{_ends(cell.speedup_ci, 2)}"


def _block(result: SweepResult, temperature: float) -> list[str]:
    cells = [cell for cell in result.cells if cell.temperature == temperature]
    batches = list(dict.fromkeys(cell.batch_size for cell in cells))
    rows = [("block", "tau", *(f"batch {size}" for size in batches))]
    for block_size in dict.fromkeys(cell.block_size for cell in cells):
        row = {cell.batch_size: cell for cell in cells if cell.block_size == block_size}
        name = "plain" if block_size == 1 else str(block_size)
        speeds = (_cell(row[size], result.best_at(temperature=temperature, batch_size=size)) for size in batches)
        rows.append((name, f"{row[batches[0]].acceptance_length:.2f}", *speeds))
    return aligned(rows, left=1)


def _cell(cell: SweepCell, fastest: SweepCell | None) -> str:
    if not cell.lossless:
        mark = "!"
    elif cell == fastest:
        mark = "*"
    else:
        mark = "~" if cell.vs_best_ci is None or cell.vs_best_ci[1] >= 1.0 else " "
    return f"{cell.tokens_per_s:.0f} ({cell.speedup:.2f}x){mark}"


def _best(result: SweepResult) -> list[str]:
    best = result.best
    lines = [f"best here  {setting_text(best)}", f"           {gain_text(best)}", f"machine    {clean_text(result.machine)}"]
    if best.block_size == 1:
        lines.append("           no drafting is faster than plain decoding on this machine")
    else:
        lines.append(f"to use it  evaluate.block_size={best.block_size} evaluate.batch_size={best.batch_size}")
    return lines


def _ends(interval: tuple[float, float] | None, digits: int) -> str:
    return "" if interval is None else f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
