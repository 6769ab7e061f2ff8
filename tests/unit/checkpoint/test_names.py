"""A name becomes a path: paths, aliases, hub ids, and what is said when it does not."""

from __future__ import annotations

import pytest

from helpers.wheels import CONTENT
from tokenmill.checkpoint.aliases import ALIASES, DEFAULT_MODEL
from tokenmill.checkpoint.download import cached_path
from tokenmill.checkpoint.hub import HubId
from tokenmill.checkpoint.names import resolve_model
from tokenmill.errors import CheckpointError, ConfigError, ModelNotFoundError


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """An empty cache, no network, and a working directory that holds nothing."""
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def put(path, content=b"{}"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_in_hub_cache(tmp_path, repo, *files):
    """A repository as the hub's own library leaves it in its cache."""
    root = tmp_path / "hub" / ("models--" + repo.replace("/", "--"))
    put(root / "refs" / "main", b"c0ffee" + b"0" * 34)
    for name in files:
        put(root / "snapshots" / ("c0ffee" + "0" * 34) / name, b"{}")
    return root / "snapshots" / ("c0ffee" + "0" * 34)


def test_a_directory_with_a_config_is_a_model(tmp_path):
    put(tmp_path / "here/models/llama/config.json")
    for name in (
        "models/llama",
        "./models/llama",
        "models/llama/",
        str(tmp_path / "here/models/llama"),
    ):
        assert resolve_model(name).resolve() == tmp_path / "here/models/llama"


def test_a_directory_with_a_tokenizer_alone_is_taken_too(tmp_path):
    put(tmp_path / "here/tok/tokenizer.json")
    assert resolve_model("tok").name == "tok"


def test_the_home_directory_is_known_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    put(tmp_path / "here/m/config.json")
    assert resolve_model("~/m") == tmp_path / "here/m"


def test_a_file_is_a_model(tmp_path):
    put(tmp_path / "here/a.gguf")
    assert resolve_model("a.gguf").name == "a.gguf"


def test_a_directory_of_one_gguf_file_means_that_file(tmp_path):
    put(tmp_path / "here/d/only.gguf")
    assert resolve_model("d").name == "only.gguf"


def test_a_directory_of_several_gguf_files_asks_for_one(tmp_path):
    put(tmp_path / "here/d/a.gguf")
    put(tmp_path / "here/d/b.gguf")
    with pytest.raises(CheckpointError, match=r"Name one of them: a\.gguf, b\.gguf"):
        resolve_model("d")


def test_a_directory_of_something_else_is_refused(tmp_path):
    put(tmp_path / "here/d/readme.txt")
    with pytest.raises(CheckpointError, match=r"neither a config\.json nor a GGUF file"):
        resolve_model("d")


def test_an_alias_in_the_cache_needs_no_network():
    alias = ALIASES[DEFAULT_MODEL]
    path = put(cached_path(alias), b"")
    with path.open("wb") as file:
        file.truncate(alias.num_bytes)  # a hole: 98 MB that take no room
    assert resolve_model(DEFAULT_MODEL) == path


def test_a_directory_here_comes_before_an_alias(tmp_path):
    put(tmp_path / "here" / DEFAULT_MODEL / "config.json")
    assert resolve_model(DEFAULT_MODEL).resolve() == tmp_path / "here" / DEFAULT_MODEL


def test_a_hub_id_in_the_hub_cache_needs_no_network(tmp_path):
    snapshot = put_in_hub_cache(tmp_path, "owner/name", "config.json")
    assert resolve_model("owner/name") == snapshot


def test_one_file_of_a_hub_repository(tmp_path):
    snapshot = put_in_hub_cache(tmp_path, "owner/name-GGUF", "q4.gguf", "q8.gguf")
    assert resolve_model("owner/name-GGUF:q8.gguf") == snapshot / "q8.gguf"
    with pytest.raises(ModelNotFoundError, match=r"holds no file 'q5\.gguf'"):
        resolve_model("owner/name-GGUF:q5.gguf")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", HubId("owner/name")),
        ("owner/name-1.5_B", HubId("owner/name-1.5_B")),
        ("owner/name:dir/q4.gguf", HubId("owner/name", "dir/q4.gguf")),
        ("name", None),
        ("a/b/c", None),
        ("owner/name:weights.bin", None),
        ("owner/", None),
        ("own er/name", None),
    ],
)
def test_form_of_hub_ids(name, expected):
    assert HubId.parse(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        *("./model", "../model", "/no/such/model", "~/model", "model/", "a/b/c"),
        *("m.gguf", "a/m.gguf", "model.safetensors", "C:\\models\\m", "dir\\m"),
    ],
)
def test_what_reads_as_a_path_is_not_looked_for_at_the_hub(name):
    with pytest.raises(ModelNotFoundError, match="reads as a path, and there is nothing at"):
        resolve_model(name)


def test_a_missing_path_offers_its_neighbour(tmp_path):
    put(tmp_path / "here/models/llama-3/config.json")
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'llama-3'\?"):
        resolve_model("./models/llama3")
    with pytest.raises(ModelNotFoundError, match="There is no directory nowhere either"):
        resolve_model("./nowhere/llama")


def test_an_unknown_name_says_what_was_tried_and_what_is_near():
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("smolm2-135m")
    message = str(caught.value)
    assert "no such file or directory" in message
    assert "none of the aliases (smollm2-135m, gemma3-270m)" in message
    assert "owner/name" in message
    assert message.endswith("Did you mean 'smollm2-135m'?")


def test_an_unknown_hub_id_offers_a_cached_one(tmp_path):
    put_in_hub_cache(tmp_path, "owner/their-model", "config.json")
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("owner/there-model")
    message = str(caught.value)
    assert "HF_HUB_OFFLINE" in message
    assert message.endswith("Did you mean 'owner/their-model'?")


def test_an_empty_name_is_refused():
    with pytest.raises(ModelNotFoundError, match="names no model"):
        resolve_model("")


@pytest.mark.parametrize("name", ["a" * 5000, f"/{'a' * 5000}/b", "~nobody-of-this-name/model"])
def test_a_name_that_no_file_can_have(name):
    with pytest.raises(ModelNotFoundError, match="No model"):
        resolve_model(name)


def test_a_revision_belongs_to_a_hub_id(tmp_path):
    put(tmp_path / "here/m.gguf", CONTENT[:8])
    for name in ("m.gguf", DEFAULT_MODEL):
        with pytest.raises(ConfigError, match="revision='v1'"):
            resolve_model(name, "v1")
    with pytest.raises(ModelNotFoundError, match="at revision 'v1'"):
        resolve_model("owner/name", "v1")
