"""Every block of the pages of recipes runs as it stands: a block of a new kind fails here.

A script that needs a GPU is asked for its options. Serving engines are stand-ins, which note how
a shell started them; what they were told goes to the mock of the engine's interface.
"""

import ast
import functools
import importlib
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from test_examples import PAGES_WITH_PYTHON, blocks_of, run_two_ranks
from test_shown_commands import commands_of, folder_of, shown

from offcore import _core, kv
from offcore.serving import engines, lmcache, sglang, vllm
from offcore.serving import transformers as serving

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "serving"), str(ROOT / "tests" / "fakes")]
from cuda_library import fake_cuda_library  # noqa: E402

import wheel  # noqa: E402

PAGES = ("docs/recipes.md", "docs/serving.md", "docs/nccl-shim.md", "docs/training.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|^((?:    [^\n]*\n|\n(?=    ))+)", re.M | re.S)
SPAN = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:[A-Z_]+=\$\(.*?\)|python |torchrun |pip )[^`]*)`")
ASSIGNED = re.compile(r"^(?:[A-Z_]+=(?:\$\([^)]*\)|\S+)(?: |$))+")
ENGINES = ("vllm", "lmcache", "sglang.launch_server")
NOTES = "import json, os, sys\njson.dump([sys.argv[1:], dict(os.environ)], open('told', 'w'))\n"
# Variables that pages set for others than Offcore.
OF_OTHERS = {"LD_PRELOAD", "LMCACHE_DEVICE_BACKEND", "VLLM_NCCL_SO_PATH"}
# A page's command for each of several hosts, as one runs it alone.
ON_ONE_HOST = {"--nnodes 4": "--nnodes 1", "--node-rank R": "--node-rank 0", "HOST": "127.0.0.1"}
# What the programs have that these pieces are written into.
BEFORE = {
    "docs/training.md": """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
ranks = [0, 1]
class Model(torch.nn.Sequential):
    layers = property(list)
model = Model(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
""",
    "docs/serving.md": """
import functools, torch, transformers
sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads)).eval()
model.set_attn_implementation("paged|sdpa")
model.generate_batch = functools.partial(
    model.generate_batch,
    generation_config=transformers.GenerationConfig(max_new_tokens=4, eos_token_id=-1),
    continuous_batching_config=transformers.ContinuousBatchingConfig(
        block_size=16, num_blocks=64, max_batch_tokens=128, use_cuda_graph=False
    ),
)
prompts = [list(range(100))]
""",
}


class Shown(NamedTuple):
    page: str
    text: str


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def commands(text: str) -> Iterator[str]:
    """A quoted string or an escaped end of a line goes on in the next line."""
    command = ""
    for line in text.splitlines(keepends=True):
        command += line
        if command.endswith("\\\n"):
            continue
        try:
            words = shlex.split(command, comments=True)
        except ValueError:
            continue
        if words:
            yield command.strip()
        command = ""
    assert not command, command


def found() -> tuple[list[Shown], list[Shown]]:
    """Pieces of Python that no other test runs, and commands."""
    pieces, lines = [], []
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        for language, fenced, indented in BLOCK.findall(text):
            block = fenced or textwrap.dedent(indented)
            if language == "python" or (not language and parses(block)):
                if not (language and page in PAGES_WITH_PYTHON):
                    pieces.append(Shown(page, block))
            else:
                lines += [Shown(page, line) for line in commands(block)]
        lines += [Shown(page, span) for span in SPAN.findall(BLOCK.sub("", text))]
    return pieces, lines


PIECES, LINES = found()


def program(command: str) -> str:
    """What a command runs: python's module or script for python; nothing but variables: nothing."""
    words = shlex.split(ASSIGNED.sub("", command), comments=True)
    if words[:2] == ["python", "-m"]:
        return words[2]
    return words[1] if words[:1] == ["python"] else "".join(words[:1])


WITH_TRANSFORMERS = ("serving.py", "gpu_train.py", "gpu_bert.py")  # they import it at once


def marks(line: Shown) -> list[pytest.MarkDecorator]:
    if program(line.text).endswith(WITH_TRANSFORMERS):
        return [pytest.mark.needs("transformers")]
    if program(line.text) != "torchrun":
        return []
    twice = re.search(r"fsdp\.py|examples/(fsdp2|ddp|tensor_parallel)", line.text)  # test_examples
    return [pytest.mark.needs("torch"), *([pytest.mark.long] if twice else [])]


def in_a_shell(command: str, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Where there are the examples, the README's program, and the programs that are stand-ins."""
    for given, alone in ON_ONE_HOST.items():
        command = re.sub(rf"(?<!\w){given}\b", alone, command)
    env = folder_of(tmp_path, command)
    for name, words in (("torchrun", "-m torch.distributed.run"), *((e, e) for e in ENGINES[:2])):
        tool = tmp_path / "bin" / name
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n', "utf-8")
        tool.chmod(0o755)
    (tmp_path / "sglang").mkdir()
    for name in (*ENGINES[:2], "sglang/launch_server.py"):
        (tmp_path / name).write_text(NOTES, "utf-8")
    recipe, page = blocks_of("docs/recipes.md")[0], blocks_of("README.md")[0]
    (tmp_path / "fsdp.py").write_text(recipe, "utf-8")
    for name in ("train.py", "your_program.py"):
        (tmp_path / name).write_text(page, "utf-8")
    env = {name: value for name, value in env.items() if name != "RANK"} | more
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "ld.so" not in done.stderr  # which ignores what it cannot load
    return done


@pytest.mark.parametrize(
    "line", [pytest.param(one, marks=marks(one), id=one.text.split("\n")[0]) for one in LINES]
)
def test_a_command_runs(line: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = program(line.text)
    if name in ENGINES:
        in_a_shell(line.text, tmp_path)
        words, env = json.loads((tmp_path / "told").read_text("utf-8"))
        TOLD[name](words, env, monkeypatch)
    elif name == "offcore":  # by tests/examples/test_shown_commands.py
        assert commands_of(f"    {line.text}\n") <= set(shown())
    elif name == "torchrun":
        in_a_shell(line.text, tmp_path)
    elif name == "pip":
        installed(line.text)
    elif name == "":
        loaded(line.text, tmp_path)
    else:
        parsed(line.text)


def installed(command: str) -> None:
    """Packages of known names; a version that is named is one that an adapter supports."""
    words = shlex.split(command, comments=True)
    assert words[:2] == ["pip", "install"]
    for one in map(Requirement, (word for word in words[2:] if word != ".")):
        assert one.name in ("torch", "transformers", "expecttest", "accelerate")
        for version in one.specifier:
            assert one.name == "transformers"
            assert engines.known(one.name, version.version, serving.VERSIONS)


def parsed(command: str) -> None:
    """A script of the repository, which has these options."""
    words = shlex.split(command, comments=True)
    if words[1:3] == ["-m", "pytest"]:
        assert [name for name in words[3:] if not (ROOT / name).is_file()] == []
        return
    assert {word for word in words if word.startswith("--")} <= options_of(words[1])


@functools.cache
def options_of(script: str) -> set[str]:
    told = (sys.executable, ROOT / script, "--help")
    return set(re.findall(r"--[\w-]+", subprocess.check_output(told, text=True, timeout=100)))


def loaded(command: str, tmp_path: Path) -> None:
    """A variable with a library for a program that opens NCCL by path."""
    name, _, _ = command.partition("=")
    asked = f"import ctypes, os; ctypes.CDLL(os.environ[{name!r}]).ncclGetVersion"
    in_a_shell(f'{command} {sys.executable} -c "{asked}"', tmp_path)


def plugin(group: str) -> Any:
    """What an engine loads by the entry point of this package."""
    of = dict(wheel.entry_points((ROOT / "pyproject.toml").read_text("utf-8")))
    module, _, name = of[group].partition(":")
    return getattr(importlib.import_module(module), name)


def told_vllm(words: list[str], env: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import torch
    import vllm_engine as engine

    assert words[0] == "serve"
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_role"] == "kv_both"
    layered = config["kv_connector"] == vllm.CONNECTOR
    assert layered != ("--kv-offloading-size" in words)
    for version in vllm.VERSIONS:
        engine.install(patch, f"{version}.0")
        for name in (vllm.NAME, vllm.CONNECTOR):
            patch.delitem(vars(vllm), name, raising=False)
        plugin("vllm.general_plugins")()
        extra = dict(config["kv_connector_extra_config"])
        tensor = torch.arange(8 * 48).to(torch.int8).view(8, 48)
        caches = engine.Caches([engine.Tensor(tensor, 48)], [[engine.Ref(0, 48)]])
        if layered:
            assert extra.pop("cpu_bytes_to_use") > 0  # what vLLM's own connector asks for
            module, name = engine.Factory.known[config["kv_connector"]]
            connector = getattr(sys.modules[module], name)
            groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["l0"])])
            of = SimpleNamespace(kv_connector_extra_config=extra)
            made = connector(SimpleNamespace(kv_transfer_config=of), None, groups)
            made.register_kv_caches(caches)
            worker = made.connector_worker.worker
        else:
            module, name = engine.Factory.known[extra.pop("spec_name")]
            spec = getattr(sys.modules[module], name)
            worker = spec(engine.Config(extra=extra)).create_worker(caches)
        assert isinstance(worker, vllm.Worker)
        worker.shutdown()


def told_sglang(words: list[str], env: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import sglang_engine as engine
    import torch

    given = dict(pairwise(words))
    engine.install(patch, sglang.VERSIONS[0])
    patch.setenv(sglang.VARIABLE, env[sglang.VARIABLE])
    plugin("sglang.srt.plugins")()
    assert "--enable-hierarchical-cache" in words
    page = int(given["--page-size"])
    layout = given["--hicache-mem-layout"]
    pool = engine.MHATokenToKVPoolHost(2, 3, page, 4 * page, layout=layout)
    store = engine.hooked(engine.Engine(given["--hicache-io-backend"]), "submit_device_to_host")
    told = store([engine.Transfer(pool, None, torch.arange(page), torch.arange(page) + page)])
    assert told == "completion device_to_host"


def told_lmcache(words: list[str], env: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    assert words[0] == "server"
    # Without these two LMCache does not start.
    assert {"--l1-size-gb", "--eviction-policy"} <= set(words)
    own = type("CudaDeviceSpec", (), {"is_available": lambda self: True})
    for name in (
        "lmcache",
        *(f"lmcache.v1{end}" for end in ("", ".platform", ".platform.devices")),
    ):
        patch.setitem(sys.modules, name, ModuleType(name))
    cuda = ModuleType("lmcache.v1.platform.devices.cuda")
    cuda.CudaDeviceSpec = own  # type: ignore[attr-defined]
    patch.setitem(sys.modules, cuda.__name__, cuda)
    patch.setenv("LMCACHE_DEVICE_BACKEND", env["LMCACHE_DEVICE_BACKEND"])
    patch.delitem(vars(lmcache), lmcache.NAME, raising=False)
    device = plugin("lmcache.device_plugins")()
    del vars(lmcache)[lmcache.NAME]  # for good: `patch` would put it back
    assert isinstance(device, own)
    assert device.is_available()
    assert device.backend_name == env["LMCACHE_DEVICE_BACKEND"]


TOLD: dict[str, Callable[[list[str], dict[str, str], pytest.MonkeyPatch], None]] = {
    "vllm": told_vllm,
    "sglang.launch_server": told_sglang,
    "lmcache": told_lmcache,
}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("piece", PIECES, ids=lambda one: one.page)
def test_a_piece_of_python_runs(piece: Shown) -> None:
    """Within the program that it is a piece of."""
    before = BEFORE[piece.page]
    if "transformers" in before:
        pytest.importorskip("transformers")
        whole = f"{before}{piece.text}\nassert len(outputs) == 1 and tier.counts\n"
        assert subprocess.run((sys.executable, "-c", whole), timeout=100).returncode == 0
        return
    if "init_process_group" not in piece.text:
        before += 'dist.init_process_group("gloo")\n'
    run_two_ranks(f"{before}{piece.text}\ndist.destroy_process_group()\n")


def test_keys_of_vllms_configuration_are_known() -> None:
    """Those that the page names besides: it accepts them, or our adapter does."""
    text = (ROOT / "docs/serving.md").read_text("utf-8").split("## vLLM")[1].split("## SGLang")[0]
    named = re.findall(r'`"(\w+)": (\{.*?\}|"[^"]*")`', text)
    assert {key for key, _ in named} == {
        *("spec_module_path", "kv_connector_module_path", "offcore")
    }
    for key, value in named:
        given = json.loads(value)
        if key == "offcore":
            assert given.keys() <= set(kv.BlockTransfer.__init__.__kwdefaults__)
        else:
            assert importlib.import_module(given) is vllm


def test_a_preloaded_shim_stands_in_front_of_nccl(tmp_path: Path) -> None:
    """As the pages preload it, into a program that calls NCCL's functions."""
    if not (Path(_core.__file__).with_name("liboffcore_nccl.so")).exists():
        pytest.skip("no shim was built on this machine")
    asked = (
        "import ctypes; n = ctypes.c_int(); call = ctypes.CDLL(None).ncclGetVersion; "
        "print(call(ctypes.byref(n)), n.value)"
    )
    real = str(fake_cuda_library().with_name("libnccl.so.2"))
    told = version_of(real)
    preloads = [line.text for line in LINES if line.text.startswith("LD_PRELOAD=")]
    assert len(preloads) >= 2
    for number, line in enumerate(preloads):
        before = line[: line.index(" torchrun")]
        folder = tmp_path / str(number)
        folder.mkdir()
        command = f'{before} {sys.executable} -c "{asked}"'
        done = in_a_shell(command, folder, OFFCORE_NCCL_LIBRARY=real)
        assert done.stdout == f"0 {told}\n"


def version_of(library: str) -> int:
    asked = "import ctypes, sys; n = ctypes.c_int(); "
    asked += "ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(n)); print(n.value)"
    return int(subprocess.check_output((sys.executable, "-c", asked, library), timeout=60))


def test_variables_of_pages_are_read() -> None:
    known = {name for name, *_ in _core.env_variables()} | OF_OTHERS
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        assert set(re.findall(r"\bOFFCORE_[A-Z_]+\b", text)) <= known
    for line in LINES:
        assert set(re.findall(r"\b([A-Z_]{4,})=", line.text)) <= known, line


def test_blocks_are_found() -> None:
    assert {one.page for one in PIECES} == BEFORE.keys()
    assert len(PIECES) >= 3
    assert {program(one.text) for one in LINES} >= {*ENGINES, "torchrun", "offcore", "pip"}
    assert len(LINES) > 25
