"""A hook of MkDocs: the site also has the pages outside ``docs/``, and a reference of the public names."""

from __future__ import annotations

import os
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import offbeat

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)#\s:]+)(#[^)]*)?\)")
DOCTEST = re.compile(r"^( *)>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`(?!\]))", re.MULTILINE | re.DOTALL)
SECTIONS = {
    "In a training script": ("DistributedOptimizer", "elastic", "epochs", "steps", "barrier", "save", "load", "NaturalGradient"),
    "Who this process is": ("rank", "world_size", "is_main_process", "chief", "log"),
    "Errors": ("OffbeatError", "ConfigurationError", "JobError", "JobEnded", "ProtocolError", "RefusedError"),
}
"""The rules follow."""


class Doctests(griffe.Extension):
    """Show the examples in docstrings as code."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Put fences around the examples of one object."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\g<0>\1```\n", obj.docstring.value + "\n")


def site_uri(path: str) -> str:
    """Return where the site has a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def repository_path(uri: str) -> str:
    """Return which file of the repository a page of the site is."""
    return "README.md" if uri == "index.md" else uri if (ROOT / uri).exists() else f"docs/{uri}"


def reference() -> str:
    """Return the page of the public names, in Markdown for mkdocstrings."""
    named = {name for names in SECTIONS.values() for name in names}
    rest = [name for name in offbeat.__all__ if name not in named and not name.startswith("_")]
    sections = {**SECTIONS, "Rules": ("rule", "Policy", *(name for name in rest if name not in ("rule", "Policy")))}
    lines = ["# The Python interface", "", "Everything below is imported from `offbeat`."]
    for title, names in sections.items():
        lines += ["", f"## {title}", *(f"\n::: {getattr(offbeat, name).__module__}.{name}" for name in names)]
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs/``, and the reference."""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("experiments/**/*.md")]:
        uri = site_uri(path.relative_to(ROOT).as_posix())
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, "api.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between files of the repository lead to pages of the site, and be plain text where the site does not have the file."""
    here = repository_path(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(here), target))
        uri = site_uri(f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path)
        if files.get_file_from_path(uri) is None:
            return text
        return f"{image}[{text}]({os.path.relpath(uri, os.path.dirname(page.file.src_uri) or '.')}{anchor or ''})"

    parts = CODE.split(markdown)
    return "".join(part if place % 2 else LINK.sub(link, part) for place, part in enumerate(parts))
