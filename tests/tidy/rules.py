"""The repository's rules about its own text, each a function of one file.

A rule takes a path (relative to the repository, with forward slashes) and the file's text, and
returns what is wrong as (line, message) pairs. `RULES` says which files each one reads.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

COLUMNS_MAX = 100
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

# What a folder of core/ may include besides itself: dependencies point one way.
LAYERS = {
    "base": set(),
    "mcast": {"base"},
    "ir": {"base"},
    "machine": {"base", "ir"},
    "plan": {"base", "ir", "machine"},
    "backend": {"base", "ir", "machine"},
    "window": {"base", "ir", "machine", "plan", "backend"},
    "comm": {"base", "ir", "machine", "plan", "backend", "window"},
    "proxy": {"base", "ir", "machine", "plan", "backend", "window"},
    "kv": {"base", "ir", "machine", "plan", "backend", "window"},
}

# Headers that would keep the core from building on any machine: drivers are opened at run time.
FOREIGN = re.compile(r"^(torch|ATen|c10|cuda|cupti|nvml|nccl|hip|hsa|rocm|rccl|nanobind|Python\.h)")

# Where the environment may be read, and why there.
ENVIRONMENT_READERS = {
    "core/base/env.cpp": "the one table of variables",
    "python/offcore/serving/lmcache.py": "LMCache's own variable names the device",
    "python/offcore/tools/bench/rank_processes.py": "hands its environment to its ranks",
    "python/offcore/tools/doctor.py": "tells variables that are set from those left alone",
    "python/pypi.py": "runs while a wheel is built, beside no core",
    "python/offcore/tools/testbed/launcher.py": "gives the hosts of a testbed a secret",
}

Findings = list[tuple[int, str]]


def lines_matching(pattern: str, text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Every match of `pattern`, with its line number."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in re.finditer(pattern, line):
            yield number, match


def includes(text: str) -> list[tuple[int, str]]:
    """The files that C++ text includes, with their line numbers."""
    found = lines_matching(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text)
    return [(number, match[1]) for number, match in found]


def check_layers(path: str, text: str) -> Findings:
    """Includes point from later layers to earlier ones, and to no vendor's headers."""
    findings = []
    folder = PurePosixPath(path).parts[1]
    allowed = LAYERS.get(folder)
    if allowed is None:
        return [(1, f"core/{folder} is not in LAYERS: say what it may include")]
    for number, name in includes(text):
        parts = PurePosixPath(name).parts
        if FOREIGN.match(name):
            findings.append((number, f"the core includes {name}: declare what it needs instead"))
        elif parts[0] == "studies":
            findings.append((number, f"core/{folder} stands without studies: {name}"))
        elif parts[0] == "core" and parts[1] != folder and parts[1] not in allowed:
            findings.append((number, f"core/{folder} may not include {name}"))
        elif parts[:2] == ("core", "backend") and len(parts) > 3:
            own = PurePosixPath(path).parts[1:-1]
            if folder != "backend":
                findings.append((number, f"core/{folder} includes one backend's own {name}"))
            elif len(own) > 1 and parts[2] not in (own[1], "exec"):
                findings.append((number, f"{own[1]} includes another backend's {name}"))
    return findings


def check_neutral(path: str, text: str) -> Findings:
    """What depends on a card or a driver is the machine's, or the backend's: no other text, code
    or comment, names one."""
    pattern = (
        r"(?i)(?<![a-z0-9])(?:[abh][12]00|mi\d{3}x?|nvidia|nvlink|amd|xgmi|cuda|hip|hsa|rocm|sdma)"
        r"(?![a-z0-9])|\bdriver \(?\d+|\(\d{3}\)"
    )
    return [
        (number, f"{match[0]}: a fact of a machine (machines/*.json) or of core/backend/cuda")
        for number, match in lines_matching(pattern, text)
    ]


def check_include_form(path: str, text: str) -> Findings:
    """Quoted includes are full paths; a source implements a header that lies beside it."""
    findings = [
        (number, f'write the full path: "core/.../{match[1]}"')
        for number, match in lines_matching(r'^\s*#\s*include\s*"(?!core/|studies/)([^"]+)"', text)
    ]
    folders = {str(PurePosixPath(name).parent) for _, name in includes(text)}
    own_folder = str(PurePosixPath(path).parent)
    if path.endswith(".cpp") and own_folder not in folders:
        findings.append((1, f"no header of {own_folder} is included: which one does it implement?"))
    return findings


def check_header(path: str, text: str) -> Findings:
    """A header says what it is, and may be included twice."""
    findings = []
    if not text.startswith("//"):
        findings.append((1, "begin with a comment that says what the file is"))
    if "\n#pragma once\n" not in text:
        findings.append((1, "#pragma once is missing"))
    return findings


def check_text(path: str, text: str) -> Findings:
    """What holds for every text file."""
    findings = []
    if text and (not text.endswith("\n") or text.endswith("\n\n")):
        findings.append((text.count("\n") + 1, "end with exactly one newline"))
    findings += [(number, "trailing blanks") for number, _ in lines_matching(r"[ \t]+$", text)]
    if PurePosixPath(path).name != "Makefile":
        findings += [(number, "a tab") for number, _ in lines_matching("\t", text)]
    for number, match in lines_matching(r"\b(T[O]DO|F[I]XME|X[X]X)\b", text):
        findings.append((number, f"{match[1]}: finish it, or write an issue"))
    findings += [
        (number, "a merge conflict") for number, _ in lines_matching(r"^(<{7}|>{7}) \w", text)
    ]
    for number, _ in lines_matching(r"(?<![\w.~}/])/(home|root|Users|work)/\w", text):
        findings.append((number, "a path of somebody's machine"))
    return findings


def check_size(path: str, text: str) -> Findings:
    """Columns and lines of a source file."""
    findings = [
        (number, f"{len(line)} columns, {COLUMNS_MAX} are the limit")
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > COLUMNS_MAX
    ]
    if (lines := text.count("\n")) > FILE_LINES_MAX:
        findings.append((lines, f"{lines} lines, {FILE_LINES_MAX} are the limit"))
    return findings


def check_names(path: str, text: str) -> Findings:
    """No class is named for what it might be."""
    pattern = r"\b(?:class|struct)\s+(\w*(?:Manager|Impl|Base|Helper|Utils))\b"
    return [
        (number, f"{match[1]}: name it for what it does")
        for number, match in lines_matching(pattern, text)
    ]


def check_rates(path: str, text: str) -> Findings:
    """_gbps are 1e9 bytes a second everywhere; of a network only goodput is counted so."""
    return [
        (number, f"{match[0]}: a rate in bits is named _gbitps")
        for number, match in lines_matching(r"\b(?!goodput_gbps\b)\w*(?:gbps|gbit_s)\b", text)
    ]


def check_environment(path: str, text: str) -> Findings:
    """Every environment variable is read through core/base/env.h."""
    if path in ENVIRONMENT_READERS:
        return []
    pattern = r"\b(secure_getenv|getenv|putenv|setenv|environb?)\b"
    return [
        (number, f"{match[1]}: read it through core/base/env.h (offcore._core.env)")
        for number, match in lines_matching(pattern, without_comments(text))
    ]


def without_comments(text: str) -> str:
    """C++ text with comments, strings and preprocessor lines blanked, line numbers kept."""
    token = re.compile(
        r'R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|'
        r"(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|//[^\n]*|/\*(?:.|\n)*?\*/"
    )
    directive = re.compile(r"^[ \t]*#(?:.*\\\n)*.*$", re.MULTILINE)

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    return directive.sub(blank, token.sub(blank, text))


@dataclass
class CppFunction:
    """A function body found in C++ text."""

    line: int
    lines: int
    head: str


def cpp_functions(text: str) -> Iterator[CppFunction]:
    """Functions at namespace or class scope, found by counting braces.

    A brace opens a scope where its head names one (namespace, class, ...) and has no parameters.
    Any other block at scope level belongs to the declaration around it; where something other
    than an initialiser's continuation follows, the declaration has ended.
    """
    source = without_comments(text)
    depth = 0  # of braces inside the current function or initialiser
    head, head_line, line = "", 1, 1
    for index, char in enumerate(source):
        if char == "\n":
            line += 1
        if depth == 0:
            if not head.strip():
                head_line = line
            if char == "{" and not is_scope(head):
                depth = 1
            elif char in "{};":
                head = ""
                continue
            head += char
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0 and source[index + 1 :].lstrip()[:1] not in (",", "{", ";", ")"):
                if "(" in head:
                    yield CppFunction(head_line, line - head_line + 1, " ".join(head.split()))
                head = ""


def is_scope(head: str) -> bool:
    """Whether the text before a brace opens a namespace or a type."""
    head = re.sub(r"\balignas\s*\([^)]*\)|\btemplate\s*<[^;{}]*?>(?=\s*(?:class|struct))", "", head)
    return bool(re.search(r"\b(namespace|class|struct|union|enum|extern)\b", head)) and (
        "(" not in head
    )


def check_cpp_functions(path: str, text: str) -> Findings:
    """No function is too long to be read at once."""
    return [
        (found.line, f"a function of {found.lines} lines, {FUNCTION_LINES_MAX} are the limit")
        for found in cpp_functions(text)
        if found.lines > FUNCTION_LINES_MAX
    ]


def check_python_functions(path: str, text: str) -> Findings:
    """No function is too long to be read at once."""
    findings = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                message = f"{node.name} has {lines} lines, {FUNCTION_LINES_MAX} are the limit"
                findings.append((node.lineno, message))
    return findings


def check_documented(path: str, text: str) -> Findings:
    """Every module says what it is for."""
    return [] if ast.get_docstring(ast.parse(text)) else [(1, "the module has no docstring")]


def undocumented(public: object) -> list[str]:
    """Names exported by a module, and public methods of its classes, without a docstring."""
    missing = []
    for name in getattr(public, "__all__", []):
        member = getattr(public, name)
        if not (inspect.isclass(member) or callable(member)):
            continue
        members = {name: member}
        if inspect.isclass(member):
            members |= {f"{name}.{key}": value for key, value in vars(member).items()}
        for key, value in members.items():
            own = not key.rsplit(".", 1)[-1].startswith("_")
            described = callable(value) or isinstance(value, property | classmethod | staticmethod)
            if own and described and not inspect.getdoc(value):
                missing.append(key)
    return missing


def check_asserts(path: str, text: str) -> Findings:
    """Every test asserts something."""
    return [
        (node.lineno, f"{node.name} asserts nothing")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not any(is_assertion(inner) for inner in ast.walk(node))
    ]


def is_assertion(node: ast.AST) -> bool:
    """An assert, pytest.raises, or a call of a function named check_... or assert_..."""
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    last = name.rsplit(".", 1)[-1]
    return name == "pytest.raises" or last.startswith(("check_", "assert_"))


def under(*folders: str, suffixes: tuple[str, ...]) -> Callable[[str], bool]:
    """A selection of files: those in a folder, with one of these endings."""
    return lambda path: path.startswith(folders) and path.endswith(suffixes)


CPP = (".h", ".cpp")
SOURCES = ("core/", "shim/", "studies/", "python/", "tests/", "benchmarks/", "examples/")

RULES: list[tuple[Callable[[str, str], Findings], Callable[[str], bool]]] = [
    (check_layers, under("core/", suffixes=CPP)),
    (check_neutral, under("core/plan/", "core/kv/", "core/comm/", suffixes=CPP)),
    (check_include_form, under("core/", "studies/", suffixes=CPP)),
    (check_header, under("core/", "shim/", "studies/", "python/bindings/", suffixes=(".h",))),
    (check_text, lambda path: True),
    (check_size, under(*SOURCES, suffixes=(*CPP, ".py"))),
    (check_names, under(*SOURCES, suffixes=(*CPP, ".py"))),
    (check_rates, lambda path: re.search(r"mcast|fat_tree|simgrid", path) is not None),
    (check_environment, under("core/", "shim/", "studies/", "python/", suffixes=(*CPP, ".py"))),
    (check_cpp_functions, under("core/", "shim/", "studies/", "python/", suffixes=CPP)),
    (check_python_functions, under(*SOURCES, suffixes=(".py",))),
    (check_documented, under("python/offcore/", suffixes=(".py",))),
    (check_asserts, under("tests/", suffixes=(".py",))),
]


def check_file(path: str, text: str) -> list[str]:
    """Everything that is wrong with a file, as path:line: message."""
    return [
        f"{path}:{line}: {message}"
        for rule, applies in RULES
        if applies(path)
        for line, message in rule(path, text)
    ]
