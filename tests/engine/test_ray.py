"""Ranks that Ray places, on a cluster of two nodes in one machine; Ray is in an environment of its
own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import write_wide_llama
from tokenmill.errors import ConfigError
from tokenmill.executor.ray import _imported
from tokenmill.kernels import native

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from tokenmill import LLM, SamplingParams
from tokenmill.errors import TokenmillError

SETTINGS = {
    "dtype": "float32", "device": "cpu", "block_size": 32, "num_kv_blocks": 9,
    "max_model_len": 128, "skip_tokenizer_init": True, "num_threads": 1,
}
RAY = {"distributed_executor_backend": "ray"}
PROMPT = {"prompt_token_ids": [3, 4, 5, 6]}
PARAMS = SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True, logprobs=1)


def engine(**settings):
    return LLM(sys.argv[1], **SETTINGS, **settings)


def generate(llm):
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs
    return [output.token_ids, [[each.logprob for each in s.values()] for s in output.logprobs]]


def refusal(**settings):
    try:
        engine(**settings, **RAY).close()
    except TokenmillError as error:
        return f"{type(error).__name__}: {error}"


def ranks():
    # (pid, pid of the actor) of the ranks that are there.
    found = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\\0")
            status = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"tokenmill.executor.rank_process" in arguments and sys.argv[1].encode() in arguments:
            found.append((int(entry.name), int(status[1]), int(arguments[5])))
    return [each[:2] for each in sorted(found, key=lambda each: each[2])]


def until_gone(pids):
    for _ in range(600):
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.1)


def killed(choose):
    # What a request says after one process has died, and whether no rank is left.
    with engine(tensor_parallel_size=2, **RAY) as llm:
        generate(llm)
        before = ranks()
        os.kill(choose(before[1]), signal.SIGKILL)
        try:
            generate(llm)
        except TokenmillError as error:
            said = str(error)
        return [said, len(before), until_gone([pid for pid, _ in before])]


found = {"no cluster": refusal(tensor_parallel_size=2)}
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 << 20}
)
os.environ["RAY_ADDRESS"] = cluster.address
try:
    found["too few"] = refusal(tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2)
    cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    for name, sizes in {
        "tensor": {"tensor_parallel_size": 2},
        "stages": {"pipeline_parallel_size": 2, "nnodes": 2},
        "apart": {"tensor_parallel_size": 2, "nnodes": 2},
    }.items():
        with engine(**sizes, **RAY) as llm:
            found[name] = generate(llm)
        found[f"{name} left"] = len(ranks())
    with engine(tensor_parallel_size=2) as llm:
        found["tensor without"] = generate(llm)
    with engine(pipeline_parallel_size=2) as llm:
        found["stages without"] = generate(llm)
    found["rank killed"] = killed(lambda rank: rank[0])
    found["actor killed"] = killed(lambda rank: rank[1])
    with engine(tensor_parallel_size=2, **RAY) as llm:
        found["afterwards"] = generate(llm)
finally:
    cluster.shutdown()
print(json.dumps(found))
"""


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"'ray' needs `pip install \"tokenmill\[ray\]\"`"):
        _imported()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has Ray, and all that this one has."""
    path = tmp_path_factory.mktemp("ray") / "venv"
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    python = str(path / "bin" / "python")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"]["ray"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
    ours = sysconfig.get_path("purelib")
    theirs = sysconfig.get_path("purelib", vars={"base": str(path)})
    (Path(theirs) / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return python


def run_script(python: str, tmp_path: Path, short: str) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", SCRIPT, str(write_wide_llama(tmp_path / "model"))],
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "", "RAY_TMPDIR": short},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")
def test_a_cluster_of_two_nodes(python: str, tmp_path: Path) -> None:
    short = tempfile.mkdtemp(prefix="ray-")  # paths of sockets in it have 100 characters at most
    try:
        found = run_script(python, tmp_path, short)
    finally:
        shutil.rmtree(short, ignore_errors=True)
    assert found["no cluster"].startswith("ConfigError: distributed_executor_backend='ray': no Ray")
    assert "`ray start --head`" in found["no cluster"]
    assert (
        "needs 2 processors on each of nnodes=2 machines, for 2 ranks of num_threads=1 there, but"
        " those of the cluster have 2." in found["too few"]
    )
    assert found["tensor"] == found["tensor without"], "the bits of ranks that Ray has not placed"
    assert found["stages"] == found["stages without"]
    assert found["apart"][0] == found["tensor"][0]
    assert [found[f"{name} left"] for name in ("tensor", "stages", "apart")] == [0, 0, 0]
    said, num_ranks, are_gone = found["rank killed"]
    assert "Rank 1 was killed by SIGKILL" in said
    assert (num_ranks, are_gone) == (2, True)
    said, num_ranks, are_gone = found["actor killed"]
    assert "has gone: a Ray actor cannot run ranks" in said
    assert (num_ranks, are_gone) == (2, True)
    assert found["afterwards"] == found["tensor"]
