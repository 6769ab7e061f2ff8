"""Images through `tokenmill serve`, with a small model of the LLaVA family in its core."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from helpers.live_server import chunks_of
from helpers.pictures import as_file, flat_png, image_url, picture
from helpers.serve_process import ServeProcess
from helpers.vision_models import saved
from tokenmill import LLM, SamplingParams

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the manner of the family: images first, then text; parts alone are taken."""
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
PNG = as_file(picture(40, 30))
QUESTION = {"type": "text", "text": "The quick brown fox"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("media")
    (root / "a.png").write_bytes(PNG)
    (root / "template.jinja").write_text(TEMPLATE)
    return root


@pytest.fixture(scope="module")
def served(root):
    flags = ("--chat-template", str(root / "template.jinja"), "--enable-prompt-tokens-details")
    with ServeProcess(
        *flags, "--allowed-local-media-path", str(root), model=saved("llava")
    ) as process:
        yield process


@pytest.fixture(scope="module")
def client(served):
    return served.client()


@pytest.fixture(scope="module")
def llm():
    settings = {"dtype": "float32", "num_kv_blocks": 64, "num_threads": 1, "device": "cpu"}
    with LLM(str(saved("llava")), chat_template=TEMPLATE, **settings) as llm:
        yield llm


def ask(client, *parts, path="/v1/chat/completions", **fields):
    messages = [{"role": "user", "content": [*parts, QUESTION]}]
    return client.post(path, {"messages": messages, **GREEDY, **fields})


def answer(reply):
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    return choice["token_ids"]


def offline(llm, *images):
    content = [*({"type": "image_pil", "image_pil": each} for each in images), QUESTION]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    return output


def test_the_answer_is_the_one_that_the_model_gives_offline(client, llm):
    reply = ask(client, image_url(PNG))
    expected = offline(llm, picture(40, 30))
    assert answer(reply) == expected.outputs[0].token_ids
    assert reply.json["prompt_token_ids"] == expected.prompt_token_ids
    assert reply.json["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    prompt = {
        "prompt": "<|im_start|>user\n<image>\nThe quick brown fox<|im_end|>\n"
        "<|im_start|>assistant\n",
        "multi_modal_data": {"image": PNG},
    }
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (written,) = llm.generate(prompt, params, use_tqdm=False)
    assert written.outputs[0].token_ids == answer(reply)


def test_b117_answers_follow_pixels_shape_and_palette(client):
    pixels = bytes(range(240)) * 5
    images = [Image.frombytes("RGB", size, pixels) for size in ((20, 20), (40, 10), (10, 40))]
    for palette in (bytes(range(256)) * 3, bytes(range(255, -1, -1)) * 3):
        images.append(Image.frombytes("P", (30, 40), pixels))
        images[-1].putpalette(palette)
    answers = [tuple(answer(ask(client, image_url(as_file(each))))) for each in images]
    assert len(set(answers)) == len(images)
    again = [tuple(answer(ask(client, image_url(as_file(each))))) for each in reversed(images)]
    assert again[::-1] == answers


def test_the_prefix_cache_knows_images_by_their_content(client):
    first = ask(client, image_url(as_file(picture(seed=7))), max_tokens=4)
    same = ask(client, image_url(as_file(picture(seed=7), "BMP")), max_tokens=4)
    other = ask(client, image_url(as_file(picture(seed=8))), max_tokens=4)
    cached = [
        reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        for reply in (first, same, other)
    ]
    assert cached[0] == cached[2] == 0 < cached[1]
    assert answer(first) == answer(same) != answer(other)


def test_many_at_once_are_each_as_alone(client):
    files = [as_file(picture(20 + seed, 30, seed=seed)) for seed in range(6)]
    parts = [[image_url(file)] for file in files] + [[image_url(files[0]), image_url(files[1])], []]
    alone = [answer(ask(client, *each)) for each in parts]
    found = [None] * len(parts)

    def work(number):
        found[number] = answer(ask(client, *parts[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_a_stream_several_sequences_and_tokenize(client):
    whole = ask(client, image_url(PNG))
    chunks = chunks_of(ask(client, image_url(PNG), stream=True))
    streamed = [
        token_id
        for chunk in chunks
        for choice in chunk["choices"]
        for token_id in choice.get("token_ids") or []
    ]
    assert streamed == answer(whole)
    several = ask(client, image_url(PNG), n=3, temperature=1.0, seed=1).json
    assert len({tuple(each["token_ids"]) for each in several["choices"]}) > 1
    counted = ask(client, image_url(PNG), path="/tokenize").json
    assert counted["tokens"] == whole.json["prompt_token_ids"]
    assert several["usage"]["prompt_tokens"] == counted["count"]


def test_files_and_texts(client, root):
    by_path = ask(client, image_url(f"file://{root}/a.png"))
    assert answer(by_path) == answer(ask(client, image_url(PNG)))
    assert ask(client, image_url("file:///etc/hostname")).status == 400
    assert len(answer(ask(client))) == 8
    assert client.complete(prompt="One two", max_tokens=2).status == 200
    assert client.complete(prompt="One <image>", max_tokens=2).status == 400
    named = ask(client, {"type": "text", "text": "<image>"}).json
    assert named["usage"]["prompt_tokens"] < 40


def peak_bytes(pid):
    """Most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10


def test_b116_bombs_cost_the_server_little(served, client):
    answer(ask(client, image_url(PNG)))
    before = peak_bytes(served.process.pid)
    reply = ask(client, *[image_url(flat_png(20_000, 20_000))] * 3)
    assert reply.status == 400
    assert "33554432 pixels" in reply.error["message"]
    assert peak_bytes(served.process.pid) - before < 300 << 20
    answer(ask(client, image_url(PNG)))


def test_b118_nothing_is_fetched_unless_somebody_allows_it(client):
    hits = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            hits.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        for host in ("127.0.0.1", "localhost", "2130706433", "example.org@127.0.0.1"):
            reply = ask(client, image_url(f"http://{host}:{server.server_address[1]}/a.png"))
            assert reply.status == 400
        server.shutdown()
    assert not hits


def test_the_process_of_the_server_needs_no_torch(served, client):
    answer(ask(client, image_url(PNG)))
    maps = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "PIL/_imaging" in maps
    assert "libtorch" not in maps
