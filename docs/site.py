"""What the site (mkdocs.yml) has beside the pages of docs/: the command line's reference, pages of
the repository's root, and the sources that pages link to.

Pages are written for GitHub. There links lead to any file of the repository, and a list needs no
blank line before it; here both are adapted. A link to a file that does not exist ends the build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import griffe
import typer
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
GENERATED = {"cli.md": lambda: cli_page()}
# A link, but not one that is shown as code.
LINK = re.compile(r"(`[^`]*`)|\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for name, made in GENERATED.items():
        files.append(File.generated(config, name, content=made()))
    for name in PROJECT:
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, f"project/{name}", content=text))
    linked = {target for page in list(files) for target in outside(page) if target not in PROJECT}
    for target in sorted(linked):
        files.append(File.generated(config, source_page(target), content=content_of(target)))
    return files


def origin(page: File) -> str:
    """Where a page lies in the repository."""
    return page.src_uri.removeprefix("project/") if is_project(page) else f"docs/{page.src_uri}"


def is_project(page: File) -> bool:
    return page.src_uri.startswith("project/")


def targets(page: File) -> Iterator[str]:
    if page.src_uri.endswith(".md") and page.src_uri not in GENERATED:
        for match in LINK.finditer(page.content_string):
            if match[2] and "://" not in match[2] and not match[2].startswith("mailto:"):
                folder = posixpath.dirname(origin(page))
                yield posixpath.normpath(posixpath.join(folder, match[2]))


def outside(page: File) -> Iterator[str]:
    """Files and folders of the repository that a page links to, and that docs/ does not hold."""
    return (one for one in targets(page) if not is_page(one))


def is_page(target: str) -> bool:
    return target.startswith("docs/") and (ROOT / target).is_file()


def source_page(target: str) -> str:
    return f"source/{target}.txt"


def content_of(target: str) -> str:
    path = ROOT / target
    if path.is_dir():
        return "".join(f"{one.relative_to(ROOT)}\n" for one in sorted(path.iterdir()))
    if not path.is_file():
        raise PluginError(f"a page links to {target}, which does not exist")
    return path.read_text("utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    file = page.file
    if file.src_uri in GENERATED:
        return markdown
    here = posixpath.dirname(file.src_uri)

    def led(match: re.Match[str]) -> str:
        if not match[2] or "://" in match[2] or match[2].startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin(file)), match[2]))
        if is_page(target):
            place = target.removeprefix("docs/")
        else:
            place = f"project/{target}" if target in PROJECT else source_page(target)
        return f"]({posixpath.relpath(place, here or '.')}{match[3] or ''})"

    return with_blanks(LINK.sub(led, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Cells with the name of a variable may break behind an underscore, for narrow screens."""
    return re.sub(
        r"(?<=<td>)[A-Z]+_[A-Z_]+(?=</td>)", lambda name: name[0].replace("_", "_<wbr>"), html
    )


def with_blanks(markdown: str) -> str:
    """A blank line before each list that follows a paragraph."""
    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        fenced ^= line.startswith("```")
        before = lines[-1] if lines else ""
        begins = re.match(r"(- |\d+\. )", line) and before.strip()
        if begins and not fenced and not re.match(r"(- |\d+\. | )", before):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


class Arguments(griffe.Extension):
    """Docstrings name arguments as `name: what it is`, in lines or sentences: here a list."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            paragraphs = re.split(r"\n\s*\n", obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(with_arguments, paragraphs))


ARGUMENT = r"(?!cuda:|sdma:|sim:|host:)([a-z]\w*(?:, [a-z]\w*)*): "


def with_arguments(paragraph: str) -> str:
    if paragraph.startswith((" ", "|", "-")):  # code, a table, a list
        return paragraph
    text = re.sub(rf"\n(?={ARGUMENT})", "\0", paragraph)
    text = re.sub(rf"(?<=\.)\s+(?={ARGUMENT})", "\0", " ".join(text.split()))
    first, *others = text.split("\0")
    if not others and not re.match(ARGUMENT, first):
        return paragraph
    lines: list[str] = []
    for one in (first, *others):
        named = re.match(ARGUMENT, one)
        meaning, raises, errors = (one[named.end() :] if named else one).partition("Raises `Error`")
        lines.append(f"- `{named[1]}`: {meaning}" if named else f"{meaning}\n")
        lines += [f"\n{raises}{errors}\n"] if raises else []
    return "\n".join(lines)


def cli_page() -> str:
    """Every command's help page."""
    from offcore.tools.cli.main import app

    lines = [
        "# Command line",
        "From `offcore --help`. `--json FILE` writes one JSON object per line (`-`: stdout).",
        "Exit codes are on the page of [errors](errors.md#exit-codes).",
        "",
    ]
    for name, command in commands(typer.main.get_command(app), "offcore"):
        lines += [f"## {name}", "", *described(command, name), ""]
    return "\n".join(lines)


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for key, one in command.commands.items():
            yield from commands(one, f"{name} {key}")
    else:
        yield name, command


def described(command: Any, name: str) -> Iterator[str]:
    text = (command.help or "").replace("\b\n", "\0")
    prose, _, examples = text.partition("\0")
    yield " ".join(prose.split("\n\n")[0].split()).replace("*", r"\*")
    for paragraph in prose.split("\n\n")[1:]:
        yield ""
        yield " ".join(paragraph.split()).replace("*", r"\*")
    yield ""
    whole = re.sub(r" *\\\n +", " ", examples)  # a page scrolls
    yield from ("    " + line.strip() for line in whole.strip().splitlines())
    context = click.Context(command, info_name=name)
    rows = [row for one in command.get_params(context) if (row := one.get_help_record(context))]
    yield from ("", "| | |", "|---|---|")
    for option, meaning in rows:
        yield f"| `{option}` | {meaning} |".replace("*", r"\*")
