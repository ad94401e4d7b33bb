"""Each rule finds what it is there to find, and only that."""

import pytest
import rules

LONG_BODY = "  step();\n" * 69


def messages(path: str, text: str) -> list[str]:
    """What the rules say about a file, without its place."""
    return [finding.split(": ", 1)[1] for finding in rules.check_file(path, text)]


def header(*lines: str) -> str:
    """A header file that breaks no rule but those that the lines break."""
    return "\n".join(["// What it is.", "#pragma once", *lines, ""])


PLANTED = {
    "upward": ("core/ir/a.h", header('#include "core/plan/plan.h"'), "core/ir may not include"),
    "one_backend": (
        "core/kv/a.h",
        header('#include "core/backend/cuda/memory.h"'),
        "core/kv includes one backend's own",
    ),
    "plan_backend": (
        "core/plan/a.h",
        header('#include "core/backend/backend.h"'),
        "core/plan may not include",
    ),
    "backend_plan": (
        "core/backend/sim/a.h",
        header('#include "core/plan/plan.h"'),
        "core/backend may not include",
    ),
    "another_backend": (
        "core/backend/sim/a.h",
        header('#include "core/backend/sdma/encode.h"'),
        "sim includes another backend's",
    ),
    "card": ("core/kv/a.h", header("// An H200 pauses."), "H200: a fact of a machine"),
    "driver": ("core/plan/a.h", header("// driver 580 refuses"), "driver 580: a fact of a machine"),
    "vendor": ("core/comm/a.h", header("int x = options.cuda.y;"), "cuda: a fact of a machine"),
    "siblings": ("core/kv/a.h", header('#include "core/comm/lane.h"'), "core/kv may not"),
    "mcast": ("core/mcast/a.h", header('#include "core/ir/command.h"'), "core/mcast may not"),
    "cuda": ("core/backend/cuda/a.h", header("#include <cuda.h>"), "the core includes cuda.h"),
    "torch": ("core/base/a.h", header("#include <torch/torch.h>"), "the core includes torch/"),
    "hsa": ("core/base/a.h", header('#include "hsa/hsa.h"'), "the core includes hsa/hsa.h"),
    "unknown_layer": ("core/extra/a.h", header(), "core/extra is not in LAYERS"),
    "relative": ("core/ir/a.h", header('#include "command.h"'), "write the full path"),
    "no_header": ("core/ir/a.cpp", "#include <vector>\n", "no header of core/ir is included"),
    "no_comment": ("core/ir/a.h", "#pragma once\n\n", "begin with a comment"),
    "no_pragma": ("core/ir/a.h", "// What it is.\n", "#pragma once is missing"),
    "no_newline": ("docs/a.md", "text", "end with exactly one newline"),
    "blank_end": ("docs/a.md", "text\n\n", "end with exactly one newline"),
    "trailing": ("docs/a.md", "text \n", "trailing blanks"),
    "tab": ("docs/a.md", "a\tb\n", "a tab"),
    "unfinished": ("docs/a.md", "TODO later\n", "TODO: finish it"),
    "conflict": ("docs/a.md", "<<<<<<< HEAD\na\n", "a merge conflict"),
    "own_path": ("docs/a.md", "see /home/me/file\n", "a path of somebody's machine"),
    "wide": ("core/ir/a.h", header("// " + "x" * 98), "101 columns"),
    "tall": ("core/ir/a.h", header(*["//"] * 499), "501 lines"),
    "name_cpp": ("core/ir/a.h", header("class QueueManager {};"), "QueueManager: name it"),
    "name_python": ("tests/a.py", "class ThingBase:\n    pass\n", "ThingBase: name it"),
    "bits": ("core/mcast/a.h", header("double link_gbps;"), "link_gbps: a rate in bits"),
    "getenv": ("core/ir/a.h", header('auto x = std::getenv("X");'), "getenv: read it through"),
    "environ": (
        "python/offcore/a.py",
        '"""A module."""\n\nimport os\n\nx = os.environ["X"]\n',
        "environ: read it through",
    ),
    "long_function": (
        "core/ir/a.h",
        header("namespace a {", "int f() {", LONG_BODY + "}", "}"),
        "a function of 71 lines",
    ),
    "long_constructor": (
        "core/ir/a.h",
        header("class A {", "  A(int b) : b_{b}, c_{1} {", LONG_BODY + "  }", "};"),
        "a function of 71 lines",
    ),
    "long_template": (
        "core/ir/a.h",
        header("template <class T>", "void f(T t) {", LONG_BODY + "}"),
        "a function of 72 lines",
    ),
    "long_python": ("tests/a.py", "def f():\n" + "    g()\n" * 70, "f has 71 lines"),
    "no_module_docstring": ("python/offcore/a.py", "x = 1\n", "the module has no docstring"),
    "no_assert": ("tests/test_a.py", "def test_a():\n    run()\n", "test_a asserts nothing"),
}


@pytest.mark.parametrize(("path", "text", "message"), PLANTED.values(), ids=PLANTED.keys())
def test_planted_violation_is_found(path: str, text: str, message: str) -> None:
    assert [found for found in messages(path, text) if found.startswith(message)] != []


CLEAN = {
    "layers": ("core/plan/a.h", header('#include "core/ir/a.h"', "#include <vector>")),
    "executor": ("core/backend/sim/a.h", header('#include "core/backend/exec/executor.h"')),
    "source": ("core/ir/a.cpp", '#include "core/ir/b.h"\n\n#include <vector>\n'),
    "makefile": ("Makefile", "a:\n\tb\n"),
    "url": ("docs/a.md", "https://example.org/home/page and ~/file\n"),
    "table": ("core/ir/a.h", header("constexpr Row kRows[] = {", "{f(1)},\n" * 80 + "};")),
    "class": ("core/ir/a.h", header("class A {", "  void f();\n" * 80 + "};")),
    "in_string": ("core/ir/a.h", header('int f() { g("{"); /* { */ }', "int a;\n" * 80)),
    "in_macro": ("core/ir/a.h", header("#define F(x) \\", "  { x", "int a;\n" * 80)),
    "env_named": ("core/ir/a.h", header("// never calls getenv")),
    "raises": (
        "tests/test_a.py",
        "def test_a():\n    with pytest.raises(ValueError):\n        f()\n",
    ),
    "helper": ("tests/test_a.py", "def test_a():\n    check_all(1)\n"),
}


@pytest.mark.parametrize(("path", "text"), CLEAN.values(), ids=CLEAN.keys())
def test_clean_file_passes(path: str, text: str) -> None:
    assert messages(path, text.rstrip("\n") + "\n") == []


def test_function_lengths_are_counted_from_the_signature() -> None:
    text = "int f(int a,\n      int b) {\n  if (a) {\n    h();\n  }\n  return a;\n}\n\nint g() {}\n"
    assert [(found.line, found.lines) for found in rules.cpp_functions(text)] == [(1, 7), (9, 1)]


class Exported:
    """Stands in for a module: of its three exports, two lack a docstring somewhere."""

    __all__ = ("LIMIT", "described", "silent", "Thing")
    LIMIT = 3

    class Thing:
        """A class."""

        def silent(self) -> None:
            pass

        def _private(self) -> None:
            pass

    @staticmethod
    def described() -> None:
        """Does nothing."""

    @staticmethod
    def silent() -> None:
        pass


def test_exports_without_a_docstring_are_found() -> None:
    assert rules.undocumented(Exported) == ["silent", "Thing.silent"]
