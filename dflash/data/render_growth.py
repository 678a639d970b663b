"""Templates whose text only grows with the conversation: one rendering then shows every prefix of it.

Rendering each prefix of a conversation costs as much again as tokenizing it once it has many turns. Most templates write
a head, then one message after another, then the generation prompt, and never look ahead. For these the rendering of a prefix
is what the whole rendering had written when its loop took the next message, and a fixed tail.

Invariant: `growing_loop` accepts a template only if that follows from its syntax: the messages are used by one loop at the top
level, by `messages[0]`, and under other names (`messages` or `messages[1:]`); the loop knows no more than its place;
the generation prompt stands behind the loop and depends on nothing that the loop or the head set. Everything else is
rendered prefix by prefix; that both ways agree is a property test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, SupportsIndex

from jinja2 import Template, nodes

_MESSAGES = "messages"
_PROMPT = "add_generation_prompt"
_KNOWN_OF_LOOP = frozenset({"first", "index", "index0"})
_UNREADABLE = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.Break)


@dataclass(frozen=True, slots=True)
class Growth:
    """A whole rendering and the places where it went on to the next message.

    Attributes:
        text: without a generation prompt.
        starts: of message i, the length that the text had when the loop took it; the last entry is the end of the loop.
    """

    text: str
    starts: tuple[int, ...]


def grown(template: Template, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Growth | None:
    """Render a conversation without generation prompt; None if the loop did not take all messages.

    Args:
        template: one that `growing_loop` accepts.
        variables: all but the messages and the generation prompt.
        messages: as the template sees them.

    Raises:
        Whatever the template raises on these messages.
    """
    pieces: list[str] = []
    watched = _Watched(messages, pieces, first=0)
    for piece in template.generate(messages=watched, **{_PROMPT: False}, **variables):
        pieces.append(piece)  # noqa: PERF402 - one by one, as the watched messages look at what is there
    marks = watched.marks
    if len(marks) not in (len(messages), len(messages) + 1):  # the first may be skipped: a system turn that the head wrote
        return None
    lengths = [0, *accumulate(map(len, pieces))]
    places = [lengths[mark] for mark in marks]
    return Growth("".join(pieces), tuple(places if len(marks) > len(messages) else [0, *places]))


def growing_loop(tree: nodes.Template, *, tool_turns: bool) -> bool:
    """Whether a chat template's text only grows with the conversation.

    Args:
        tree: its syntax; changed if there are no tool turns.
        tool_turns: whether the conversation may have any. Many templates look ahead only to join them.
    """
    if not tool_turns:
        loops_over = [node for node in tree.body if isinstance(node, nodes.For)]
        targets = {loop.target.name for loop in loops_over if isinstance(loop.target, nodes.Name)}
        for branch in tree.find_all(nodes.If):
            if _asks_for_tool_turn(branch.test, targets):
                branch.body = []  # never written, so it cannot look anywhere
    if any(True for _ in tree.find_all(_UNREADABLE)):
        return False
    aliases = _aliases(tree)
    loops = [(place, node) for place, node in enumerate(tree.body) if isinstance(node, nodes.For) and _is_name(node.iter, aliases)]
    if aliases is None or len(loops) != 1:
        return False
    place, loop = loops[0]
    if loop.else_ or loop.test is not None or loop.recursive:
        return False
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    stored |= {macro.name for macro in tree.find_all(nodes.Macro)} | {"tools", "documents"}
    tail = tree.body[place + 1 :]
    tests = [node.test for node in tail if isinstance(node, nodes.If)]
    return (
        all(_is_fixed(node, stored) for node in tail)
        and _uses_are_known(tree, aliases, loop)
        and all(any(name is test for test in tests) for name in _loads(tree, _PROMPT))
    )


class _Watched(list[Any]):
    """Messages that note, whenever a loop takes the next one, how many pieces of text were written by then."""

    def __init__(self, messages: Sequence[Any], pieces: list[str], *, first: int) -> None:
        super().__init__(messages[first:])
        self._pieces = pieces
        self.marks: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        self.marks.clear()
        for message in super().__iter__():
            self.marks.append(len(self._pieces))
            yield message
        self.marks.append(len(self._pieces))

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        if not isinstance(place, slice):
            return super().__getitem__(place)
        rest = _Watched(super().__getitem__(place), self._pieces, first=0)
        rest.marks = self.marks  # the loop over the rest is noted here
        return rest


def _aliases(tree: nodes.Template) -> frozenset[str] | None:
    """Names under which the template knows the messages; None if one of them is also something else."""
    names = {_MESSAGES}
    assigned = list(tree.find_all(nodes.Assign))
    for each in assigned:
        if isinstance(each.target, nodes.Name) and _is_messages(each.node):
            names.add(each.target.name)
    others = [name for name in tree.find_all(nodes.Name) if name.ctx != "load" and name.name in names]
    plain = [each.target for each in assigned if _is_messages(each.node)]
    if any(name.name == _MESSAGES or not any(name is target for target in plain) for name in others):
        return None
    return frozenset(names)


def _is_messages(node: nodes.Node) -> bool:
    """Whether an expression is `messages` or `messages[1:]`."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        cut = node.arg
        from_second = isinstance(cut.start, nodes.Const) and cut.start.value == 1 and cut.stop is None and cut.step is None
        return from_second and _is_name(node.node, {_MESSAGES})
    return _is_name(node, {_MESSAGES})


def _uses_are_known(tree: nodes.Template, aliases: frozenset[str], loop: nodes.For) -> bool:
    """Whether nothing in the template looks ahead: at later messages, or at where the loop ends."""
    allowed: set[int] = {id(loop.iter)}
    for each in tree.find_all(nodes.Assign):
        if _is_messages(each.node):
            allowed |= {id(name) for name in each.node.find_all(nodes.Name)} | {id(each.node)}
    for item in tree.find_all(nodes.Getitem):
        if _is_name(item.node, {_MESSAGES}) and isinstance(item.arg, nodes.Const) and item.arg.value == 0:
            allowed.add(id(item.node))
    for attribute in tree.find_all(nodes.Getattr):
        if _is_name(attribute.node, {"loop"}) and attribute.attr in _KNOWN_OF_LOOP:
            allowed.add(id(attribute.node))
    watched = aliases | {"loop", "self"}
    return all(id(name) in allowed for name in tree.find_all(nodes.Name) if name.ctx == "load" and name.name in watched)


def _asks_for_tool_turn(test: nodes.Node, targets: set[str]) -> bool:
    """Whether a test is that the role of a loop's own message is `tool`."""
    if not isinstance(test, nodes.Compare) or len(test.ops) != 1 or test.ops[0].op != "eq":
        return False
    role, other = test.expr, test.ops[0].expr
    if isinstance(role, nodes.Getattr):
        named = role.attr == "role" and _is_name(role.node, targets)
    elif isinstance(role, nodes.Getitem):
        named = isinstance(role.arg, nodes.Const) and role.arg.value == "role" and _is_name(role.node, targets)
    else:
        named = False
    return named and isinstance(other, nodes.Const) and other.value == "tool"


def _is_fixed(node: nodes.Node, stored: set[str]) -> bool:
    """Whether a part behind the loop is text, or a generation prompt that depends on flags alone."""
    if isinstance(node, nodes.If):
        only_prompt = _is_name(node.test, {_PROMPT}) and not node.elif_ and not node.else_
        return only_prompt and all(_is_flat(each, stored) for each in node.body)
    return isinstance(node, nodes.Output) and all(isinstance(part, nodes.TemplateData) for part in node.nodes)


def _is_flat(node: nodes.Node, stored: set[str]) -> bool:
    if isinstance(node, nodes.For | nodes.Assign | nodes.AssignBlock | nodes.Macro | nodes.CallBlock | nodes.FilterBlock):
        return False
    parts = [node, *node.find_all((nodes.Call, nodes.Name))]
    return not any(isinstance(part, nodes.Call) or (isinstance(part, nodes.Name) and part.name in stored) for part in parts)


def _loads(tree: nodes.Template, name: str) -> list[nodes.Name]:
    return [each for each in tree.find_all(nodes.Name) if each.name == name]


def _is_name(node: nodes.Node, names: frozenset[str] | set[str] | None) -> bool:
    return isinstance(node, nodes.Name) and names is not None and node.name in names
