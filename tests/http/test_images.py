"""Images over HTTP: parts of messages, what is refused, what is fetched, and what it all costs."""

from __future__ import annotations

import resource
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from helpers.fake_engine import FakeEngine, tiny_tokenizer
from helpers.live_server import LiveServer, chunks_of
from helpers.pictures import (
    END,
    MARK,
    PLACEHOLDER,
    TinyProcessor,
    as_file,
    data_url,
    flat_png,
    gif_of_many_frames,
    image_url,
    picture,
    tiny_images,
)
from tokenmill.features.multimodal.fetching import Fetcher

TWO = [PLACEHOLDER] * 2 + [END]
"""What a picture of 16 x 8 becomes."""
PNG = as_file(picture())


class Hits:
    """A web server of this machine that counts who comes."""

    def __init__(self, location=None):
        self.paths = paths = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                paths.append(self.path)
                self.send_response(302 if location else 200)
                self.send_header("Location", location or "/")
                self.send_header("Content-Length", str(len(PNG)))
                self.end_headers()
                self.wfile.write(PNG)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        self.server.shutdown()
        self.server.server_close()


def engine(**settings):
    return FakeEngine(images=tiny_images(max_images=4, **settings))


@pytest.fixture(scope="module")
def server():
    with LiveServer(engine()) as server:
        yield server


def ask(server, *parts, path="/v1/chat/completions", **fields):
    return server.post(path, {"messages": [{"role": "user", "content": list(parts)}], **fields})


def text(words):
    return {"type": "text", "text": words}


def lives(server):
    return server.chat().status == 200


def test_an_image_in_a_chat(server):
    reply = ask(server, text("What is"), image_url(PNG), text("this?"), return_token_ids=True)
    assert reply.status == 200
    encode = tiny_tokenizer().encode
    before, after = encode("<|im_start|>user\nWhat is"), encode("\nthis?<|im_end|>\n<|im_start|>")
    ids = reply.json["prompt_token_ids"]
    assert ids[: len(before) + 3] == before + TWO
    assert ids[len(before) + 3 :][: len(after)] == after
    assert reply.json["usage"]["prompt_tokens"] == len(ids)


def test_a_stream_and_several_answers(server):
    parts = [image_url(PNG), text("Hi"), image_url(as_file(picture(8, 8)))]
    whole = ask(server, *parts, n=3, temperature=1, max_tokens=4)
    assert len(whole.json["choices"]) == 3
    chunks = chunks_of(ask(server, *parts, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"]["prompt_tokens"] == whole.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize("add_special_tokens", [None, True])
def test_tokenize_counts_as_usage_does(server, add_special_tokens):
    fields = {"add_special_tokens": add_special_tokens}
    parts = [text("a"), image_url(PNG)]
    counted = ask(server, *parts, path="/tokenize", **fields).json
    told = ask(server, *parts, return_token_ids=True, **fields).json
    assert counted["tokens"] == told["prompt_token_ids"]
    assert counted["count"] == told["usage"]["prompt_tokens"]


def test_other_endpoints_take_them_too(server):
    source = {"type": "base64", "media_type": "image/png", "data": data_url(PNG).split(",")[1]}
    content = [{"type": "image", "source": source}, text("?")]
    body = {"model": "fake/model", "messages": [{"role": "user", "content": content}]}
    expected = ask(server, image_url(PNG), text("?")).json["usage"]["prompt_tokens"]
    counted = server.post("/v1/messages/count_tokens", body)
    assert (counted.status, counted.json["input_tokens"]) == (200, expected)
    told = server.post("/v1/messages", {**body, "max_tokens": 2})
    assert (told.status, told.json["usage"]["input_tokens"]) == (200, expected)
    parts = [
        {"type": "input_image", "image_url": data_url(PNG)},
        {"type": "input_text", "text": "?"},
    ]
    told = server.post("/v1/responses", {"input": [{"role": "user", "content": parts}]})
    assert (told.status, told.json["usage"]["input_tokens"]) == (200, expected)


def test_errors_of_other_dialects_name_what_they_sent(server):
    block = {"type": "image", "source": {"type": "url", "url": "http://x.example/y.png"}}
    content = [text("a"), block]
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    error = server.post("/v1/messages", body).json["error"]
    assert error["details"]["param"] == "messages[0].content[1].source"
    assert error["message"].startswith("messages[0].content[1].source: nothing is fetched")


def test_turns_are_left_out_around_images(server):
    """What is cut by its tokens then would cut images, too: that alone is refused."""
    image = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(PNG)}]}
    longer = {"role": "user", "content": "word " * 600}
    fields = {"truncation": "auto", "max_output_tokens": 2}
    whole = server.post("/v1/responses", {"input": [image], **fields})
    assert whole.status == 200, whole.body
    left = server.post("/v1/responses", {"input": [longer, image], **fields})
    assert left.json["usage"]["input_tokens"] == whole.json["usage"]["input_tokens"]
    joined = [{"role": "user", "content": [*image["content"], text("word " * 600)]}]
    refused = server.post("/v1/responses", {"input": joined, **fields})
    assert (refused.status, refused.error["param"]) == (400, "truncation")
    assert refused.error["message"].startswith("truncation would cut images")


def test_options_of_the_processor(server):
    plain, fine = (
        ask(server, image_url(PNG), mm_processor_kwargs=options).json["usage"]["prompt_tokens"]
        for options in (None, {"patch": 4})
    )
    assert fine == plain + 6
    deep = 1
    for _ in range(900):
        deep = {"patch": deep}
    for options in ({"size": 4}, {"patch": "4"}, deep):
        reply = ask(server, image_url(PNG), mm_processor_kwargs=options)
        assert (reply.status, reply.error["param"]) == (400, "mm_processor_kwargs")


def test_images_that_come_again_are_counted():
    with LiveServer(engine()) as server:
        for _ in range(3):
            ask(server, image_url(PNG), image_url(as_file(picture(seed=5))))
        metrics = server.get("/metrics").body.decode()
    labels = '{engine="0",model_name="fake/model"}'
    assert f"vllm:mm_cache_queries_total{labels} 6.0" in metrics
    assert f"vllm:mm_cache_hits_total{labels} 4.0" in metrics


def test_a_model_of_text_alone_says_so():
    with LiveServer(FakeEngine()) as server:
        reply = ask(server, image_url(PNG))
        assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].type")
        assert "text only" in reply.error["message"]
        assert "mm_cache" not in server.get("/metrics").body.decode()


@pytest.mark.parametrize("words", [MARK, f"{MARK}{MARK} and {MARK}"])
def test_b058_a_user_s_text_is_no_image(server, words):
    reply = ask(server, image_url(PNG), text(words), return_token_ids=True)
    ids = reply.json["prompt_token_ids"]
    assert ids.count(PLACEHOLDER) - tiny_tokenizer().encode(words).count(PLACEHOLDER) == 2
    assert tiny_tokenizer().decode(ids).count(MARK) == words.count(MARK)
    assert server.chat(messages=[{"role": "user", "content": words}]).status == 200


def test_b058_a_prompt_with_marks_and_no_images(server):
    reply = server.complete(prompt=f"a{MARK}b")
    assert reply.status == 400
    assert "1 image marks" in reply.error["message"]
    assert "0 images" in reply.error["message"]


def of_mode(mode, size=(16, 8)):
    format = {"CMYK": "JPEG"}.get(mode, "PNG")
    return as_file(Image.new(mode, size), format)


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return as_file(picture(8, 16), "JPEG", exif=exif)


FRAMES = [Image.new("RGB", (16, 8), colour) for colour in ("red", "blue")]
KINDS = {
    "1x1": (as_file(picture(1, 1)), 200),
    "1x2000": (as_file(picture(1, 2000)), 400),
    "2000x1": (as_file(picture(2000, 1)), 400),
    "odd": (as_file(picture(13, 7)), 200),
    "palette": (of_mode("P"), 200),
    "rgba": (of_mode("RGBA"), 200),
    "grey with alpha": (of_mode("LA"), 200),
    "16 bits": (of_mode("I;16"), 200),
    "cmyk": (of_mode("CMYK"), 200),
    "one bit": (of_mode("1"), 200),
    "moving": (as_file(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), 200),
    "turned": (turned(), 200),
    "cut": (PNG[:60], 400),
    "no image": (b"hello", 400),
    "empty": (b"", 400),
    "too long": (as_file(picture(200, 200)), 400),
}


@pytest.mark.parametrize("kind", KINDS)
def test_b114_every_kind_of_image(server, kind):
    data, status = KINDS[kind]
    reply = ask(server, text("a"), image_url(data))
    assert reply.status == status
    if status == 400:
        assert reply.error["message"].startswith("messages[0].content[1].image_url: ")
        assert reply.error["param"] == "messages[0].content[1].image_url"
    assert lives(server)


BOMBS = {
    "one colour": (flat_png(20_000, 20_000), 400),
    "large frames": (gif_of_many_frames(20, 6_000, 6_000), 400),
    "frames": (gif_of_many_frames(20_000), 200),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_b116_a_small_file_that_would_be_gigabytes(server, kind):
    data, status = BOMBS[kind]
    assert lives(server)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    part = image_url(data)
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.append(ask(server, part, part))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.status for each in replies] == [status] * 4
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 300 << 20
    assert status == 200 or "pixels" in replies[0].error["message"]
    assert lives(server)


def test_b116_items_and_bytes_of_a_request(server, monkeypatch):
    reply = ask(server, *[image_url(PNG)] * 5)
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "limit_mm_per_prompt" in reply.error["message"]
    monkeypatch.setattr("tokenmill.features.multimodal.limits.MAX_PROMPT_BYTES", 2 * len(PNG))
    assert ask(server, *[image_url(PNG)] * 2).status == 200
    reply = ask(server, *[image_url(PNG)] * 3)
    assert reply.status == 400
    assert f"more than {2 * len(PNG)} bytes" in reply.error["message"]


def disguises(port):
    """URLs that lead, or might be taken to lead, to a port of this machine."""
    hosts = [
        "127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0",
        "[::1]", "[::ffff:127.0.0.1]", "127.0.0.1.", "[::ffff:7f00:1]", "①②⑦.0.0.1",
        "allowed.example@127.0.0.1", "127.0.0.1\\@allowed.example", "allowed.example\\@127.0.0.1",
        "allowed.example#@127.0.0.1", "127.0.0.1#.allowed.example", "127.0.0.1%00.allowed.example",
        "127.0.0.1%2f@allowed.example", "allowed.example:80@127.0.0.1", "169.254.169.254",
        "10.0.0.1", "192.168.0.1", "inside.example", "127。0。0。1",
    ]  # fmt: skip
    urls = [f"http://{host}:{port}/" for host in hosts]
    return [
        *urls,
        f"http:\\\\127.0.0.1:{port}/",
        f"http:127.0.0.1:{port}/",
        f"//127.0.0.1:{port}/",
        f"gopher://127.0.0.1:{port}/",
        f"ftp://127.0.0.1:{port}/",
        "file:///etc/passwd",
        "file://localhost/etc/hostname",
        "/etc/passwd",
        "../../etc/passwd",
        "data:text/html,<b>",
    ]


def resolved(host, port):
    """Names of the tests lead inside; for all others the system is asked."""
    if host.endswith(".example"):
        return ["127.0.0.1"]
    return [info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@pytest.mark.parametrize("domains", [(), ("*",), ("allowed.example",)])
def test_b118_nobody_inside_is_asked(domains):
    with Hits() as hits:
        ports = tuple(f"{each}:{hits.port}" for each in domains)
        images = tiny_images(fetcher=Fetcher((*domains, *ports), resolve=resolved))
        with LiveServer(FakeEngine(images=images)) as server:
            for url in disguises(hits.port):
                reply = ask(server, image_url(url))
                assert reply.status == 400, url
                assert reply.error["param"] == "messages[0].content[0].image_url"
            assert lives(server)
        assert not hits.paths
        socket.create_connection(("127.0.0.1", hits.port)).close()  # there was somebody


_PUBLIC = {"allowed.example": "93.184.215.14", "other.example": "93.184.215.15"}


def public_fetcher(*domains, port):
    """Whose hosts are public, and served by a port of this machine."""
    return Fetcher(
        domains,
        resolve=lambda host, _: [host if host[0].isdigit() else _PUBLIC.get(host, "127.0.0.1")],
        connect=lambda _, seconds: socket.create_connection(("127.0.0.1", port), seconds),
    )


def test_b118_what_is_allowed_is_fetched():
    with Hits() as hits:
        images = tiny_images(fetcher=public_fetcher("allowed.example", port=hits.port))
        with LiveServer(FakeEngine(images=images)) as server:
            reply = ask(server, image_url("http://allowed.example/a.png"))
            assert reply.status == 200
            same = ask(server, image_url(PNG)).json["usage"]
            assert reply.json["usage"]["prompt_tokens"] == same["prompt_tokens"]
            reply = ask(server, image_url("http://other.example/a.png"))
            assert reply.status == 400
            assert "allowed_media_domains" in reply.error["message"]
        assert hits.paths == ["/a.png"]


@pytest.mark.parametrize(
    "location", ["http://inside.example/", "http://127.0.0.1/", "file:///etc/passwd"]
)
def test_b118_a_redirect_to_the_inside(location):
    with Hits(location) as hits:
        images = tiny_images(fetcher=public_fetcher("*", "allowed.example", port=hits.port))
        with LiveServer(FakeEngine(images=images)) as server:
            assert ask(server, image_url("http://allowed.example/first")).status == 400
        assert hits.paths == ["/first"]


def test_b118_files_below_the_directory_alone(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(PNG)
    (tmp_path / "media" / "link.png").symlink_to(tmp_path / "b.png")
    with LiveServer(engine(local_path=str(tmp_path / "media"))) as server:
        assert ask(server, image_url(f"file://{tmp_path}/media/a.png")).status == 200
        for name in ("b.png", "media/../b.png", "media/%2e%2e/b.png", "media/link.png", "media/c"):
            reply = ask(server, image_url(f"file://{tmp_path}/{name}"))
            assert reply.status == 400
            assert "names no file that may be read" in reply.error["message"]


class SlowProcessor(TinyProcessor):
    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()
        self.at_once = self.most = 0

    def process(self, image, options):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        assert self.goes_on.wait(30)
        self.at_once -= 1
        return super().process(image, options)


def test_others_are_answered_while_images_are_prepared():
    processor = SlowProcessor()
    with LiveServer(engine(processor=processor)) as server:
        replies = []
        threads = [
            threading.Thread(
                target=lambda seed=seed: replies.append(
                    ask(server, image_url(as_file(picture(seed=seed))))
                )
            )
            for seed in range(6)
        ]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: processor.at_once == 2)
        assert lives(server)
        assert server.get("/health").status == 200
        time.sleep(0.05)
        assert processor.most == 2  # the others wait for these
        processor.goes_on.set()
        for thread in threads:
            thread.join()
        assert [each.status for each in replies] == [200] * 6
        assert processor.num_processed == 6
