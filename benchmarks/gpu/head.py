"""The frozen head on the device: tiles against full logits, what they cost, and the screened head of decoding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.setting import Figures, Setting, matmul_flops, relative, require
from dflash.model.acceptance import acceptance_rows
from dflash.model.head import FrozenHead, label_rows
from dflash.model.logit_rule import LogitRule
from dflash.model.screened_head import ScreenedHead, screening_pays

RULES = {"plain": LogitRule(scale=1.0, soft_cap=None), "capped": LogitRule(scale=0.5, soft_cap=8.0)}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
CHUNK_ROWS = 384
PUBLISHED_ROWS, PUBLISHED_WIDTH, PUBLISHED_VOCABULARY = 512 * 15, 5120, 248_320
ETA = 3.0


def head_agreement(setting: Setting) -> Figures:
    """Loss and gradient of the tiled head, and of the acceptance objective, against full logits in float64."""
    rows, width, vocabulary = (24, 16, 100) if setting.tiny else (700, 1024, 70_000)
    targets = torch.randint(vocabulary, (rows,), generator=setting.generator(3), device=setting.device)
    order = torch.randperm(rows, generator=setting.generator(4), device=setting.device)
    figures: Figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = setting.normal(vocabulary, width, seed=0, dtype=dtype, scale=width**-0.5)
        hidden, theirs = (setting.normal(rows, width, seed=seed, dtype=dtype) for seed in (1, 2))
        for name, rule in RULES.items():
            head = FrozenHead(weight, rule)
            label = f"{name}_{str(dtype).removeprefix('torch.')}"
            found = label_rows(hidden, order, targets, head, chunk_rows=300)
            ce, pull = _full(hidden[order], targets, head)
            figures[f"ce_{label}"] = relative(found.ce, ce)
            figures[f"pull_{label}"] = relative(found.pull, pull)
            mixed = acceptance_rows(hidden, order, theirs, order, targets, head, eta=ETA, chunk_rows=300)
            loss, pull = _full_acceptance(hidden[order], theirs[order], head)
            figures[f"acceptance_{label}"] = relative(mixed.loss, loss)
            figures[f"acceptance_pull_{label}"] = relative(mixed.pull, pull)
            for key in ("ce", "pull", "acceptance", "acceptance_pull"):
                off = figures[f"{key}_{label}"]
                require(off <= TOLERANCE[dtype], f"{key} of {label} is off by {off:.2g} (allowed {TOLERANCE[dtype]:.0e})")
    return figures


def head_speed(setting: Setting) -> Figures:
    """Time, memory and FLOP/s at the published shape: 512 anchors, V 248,320, D 5,120."""
    shape = (60, 16, 300) if setting.tiny else (PUBLISHED_ROWS, PUBLISHED_WIDTH, PUBLISHED_VOCABULARY)
    rows, width, vocabulary = shape
    head = FrozenHead(setting.normal(vocabulary, width, seed=0, dtype=setting.dtype, scale=width**-0.5), RULES["plain"])
    hidden = setting.normal(rows, width, seed=1, dtype=setting.dtype)
    targets = torch.randint(vocabulary, (rows,), generator=setting.generator(3), device=setting.device)
    every = torch.arange(rows, device=setting.device)
    peak_flops = matmul_flops(setting)
    figures: Figures = {}
    for chunk in (CHUNK_ROWS, 4 * CHUNK_ROWS):
        work = lambda chunk=chunk: label_rows(hidden, every, targets, head, chunk_rows=chunk)  # noqa: E731
        spent_s = setting.seconds(work, repeats=3)
        held = setting.held_bytes()
        peak = setting.peak_bytes(work) - held
        figures |= {
            f"chunk_{chunk}_ms": 1e3 * spent_s,
            f"chunk_{chunk}_of_matmul": 4.0 * rows * width * vocabulary / spent_s / peak_flops,
            f"chunk_{chunk}_peak_mb": peak / 1e6,
        }
        logits = rows * vocabulary * head.weight.element_size()
        require(peak < logits // 2 or setting.tiny, f"{peak / 1e6:.0f} MB were held: half of the full logits or more")
    figures["label_ties_frac"] = _tied(hidden, head) if not setting.tiny else 0.0
    return figures


def screened_head(setting: Setting) -> Figures:
    """The screened argmax equals the float32 one on this device; it is only ever taken on a CPU."""
    vocabulary, width = (320, 16) if setting.tiny else (32_000, 256)
    weight = setting.normal(vocabulary, width, seed=0, scale=width**-0.5)
    hidden = setting.normal(64, width, seed=1)
    found, wanted = ScreenedHead(weight).argmax(hidden), (hidden @ weight.t()).argmax(-1)
    require(torch.equal(found, wanted), f"{int((found != wanted).sum())} of 64 screened choices differ")
    require(not (setting.cuda and screening_pays(weight)), "screening is taken on a GPU")
    return {"equal_choices": len(found), "taken_here": screening_pays(weight)}


def _full(hidden: Tensor, targets: Tensor, head: FrozenHead) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row and its gradient, from whole float64 logits."""
    states = hidden.double().requires_grad_()
    ce = functional.cross_entropy(head.rule.apply(states @ head.weight.double().t()), targets, reduction="none")
    return ce, torch.autograd.grad(ce.sum(), states)[0]


def _full_acceptance(hidden: Tensor, theirs: Tensor, head: FrozenHead) -> tuple[Tensor, Tensor]:
    """Value lam * KL(p || q) + (1 - lam) * (1 - A) of each row and its gradient, lam held fixed."""
    weight, states = head.weight.double().t(), hidden.double().requires_grad_()
    log_q = head.rule.apply(states @ weight).log_softmax(-1)
    log_p = head.rule.apply(theirs.double() @ weight).log_softmax(-1)
    acceptance = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    lam = torch.exp(-ETA * acceptance.detach())
    loss = lam * divergence + (1 - lam) * (1 - acceptance)
    return loss, torch.autograd.grad(loss.sum(), states)[0]


def _tied(hidden: Tensor, head: FrozenHead) -> float:
    """Share of rows whose largest logit several tokens have: such a label counts as correct, a decoder takes the first."""
    logits = torch.mm(hidden[:512], head.weight.t())
    return float(((logits == logits.amax(1, keepdim=True)).sum(1) > 1).float().mean())
