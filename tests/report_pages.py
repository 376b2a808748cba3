"""A page of a report as its parts, and what is wrong with its HTML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "hr", "img", "rect", "path"}
"""Elements without an end: those of HTML, and those of SVG that the page closes at once."""


@dataclass
class Element:
    """An element of a page, with all that is below it."""

    tag: str
    attributes: dict[str, str]
    parent: Element | None = None
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def all(self, tag: str = "", style: str = "") -> Iterator[Element]:
        """Elements below it of a tag and a class."""
        for child in self.children:
            if tag in ("", child.tag) and (not style or style in child.classes):
                yield child
            yield from child.all(tag, style)

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    @property
    def text(self) -> str:
        """All text in it; that of its own elements behind its own."""
        return "".join([*self.texts, *(f" {child.text}" for child in self.children)]).strip()


class Page(HTMLParser):
    """A page, read strictly: every element is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.faults: list[str] = []
        self._at = self.root
        self.feed(text)
        self.close()
        if self._at is not self.root:
            self.faults.append(f"<{self._at.tag}> is not closed")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.faults.append(f"<{tag}> has an attribute twice")
        found = Element(tag, {name: value or "" for name, value in attrs}, self._at)
        self._at.children.append(found)
        if tag not in VOID:
            self._at = found

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._at.tag != tag:
            self.faults.append(f"</{tag}> where <{self._at.tag}> is open, line {self.getpos()[0]}")
        if self._at.parent is not None:
            self._at = self._at.parent

    def handle_data(self, data: str) -> None:
        self._at.texts.append(data)

    @property
    def problems(self) -> list[str]:
        """What is wrong: with its form, its anchors, or for those who do not see it."""
        every = [*self.root.all()]
        ids = [e.attributes["id"] for e in every if "id" in e.attributes]
        found = [*self.faults, *(f"id {each} twice" for each in {*ids} if ids.count(each) > 1)]
        for each in every:
            href = each.attributes.get("href", "#")
            named = [each.attributes.get(k, "") for k in ("aria-labelledby", "aria-describedby")]
            targets = [href[1:], *named, each.attributes.get("for", "")]
            found += [f"nothing is {t!r}" for t in targets if t and t not in ids]
            if not href.startswith("#") or "src" in each.attributes:
                found.append(f"<{each.tag}> leads out of the page")
            found += self._unsaid(each)
        return found

    def _unsaid(self, each: Element) -> Iterator[str]:
        """What nobody would hear, or reach without a mouse."""
        if each.tag == "th" and each.attributes.get("scope") not in ("row", "col"):
            yield "a head of a table has no scope"
        if each.tag == "svg" and not each.attributes.get("aria-label"):
            yield "a graph has no name"
        if "scroll" in each.classes:
            wanted = {"tabindex": "0", "role": "region"}
            if not each.attributes.items() >= wanted.items() or "aria-label" not in each.attributes:
                yield "what scrolls cannot be reached by keyboard"
        if each.tag == "details" and not (each.children and each.children[0].tag == "summary"):
            yield "what is folded has no summary"
        if any(name.startswith("on") for name in each.attributes):
            yield f"<{each.tag}> has a script"
