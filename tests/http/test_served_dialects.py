"""Every dialect before a real engine: one conversation has one answer, with images and without."""

from __future__ import annotations

import base64

import pytest

from helpers.live_server import chunks_of
from helpers.messages import events_of as message_events
from helpers.messages import message_of
from helpers.pictures import as_file, picture
from helpers.responses import events_of as response_events
from helpers.responses import response_of
from helpers.serve_process import ServeProcess
from helpers.vision_models import saved

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PNG = base64.b64encode(as_file(picture(40, 30))).decode()
URL = f"data:image/png;base64,{PNG}"
FOX = "The quick brown fox"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    with ServeProcess("--chat-template", str(template), model=saved("llava")) as process:
        yield process.client()


def chat(client, stream, has_image):
    image = [{"type": "image_url", "image_url": {"url": URL}}] if has_image else []
    content = [*image, {"type": "text", "text": FOX}]
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 12}
    reply = client.post("/v1/chat/completions", {**fields, "temperature": 0, "stream": stream})
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(reply)]
        return "".join(delta.get("content") or "" for delta in deltas)
    return reply.json["choices"][0]["message"]["content"]


def message(client, stream, has_image):
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    image = [{"type": "image", "source": source}] if has_image else []
    content = [*image, {"type": "text", "text": FOX}]
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 12}
    reply = client.post("/v1/messages", {**fields, "temperature": 0, "stream": stream})
    assert reply.status == 200, reply.body
    answer = message_of(message_events(reply.body)) if stream else reply.json
    assert answer["stop_reason"] == "max_tokens"
    counted = client.post("/v1/messages/count_tokens", {"messages": fields["messages"]}).json
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
    return answer["content"][0]["text"]


def response(client, stream, has_image):
    image = [{"type": "input_image", "image_url": URL}] if has_image else []
    content = [*image, {"type": "input_text", "text": FOX}]
    fields = {"input": [{"role": "user", "content": content}], "max_output_tokens": 12}
    reply = client.post("/v1/responses", {**fields, "temperature": 0, "stream": stream})
    assert reply.status == 200, reply.body
    answer = response_of(response_events(reply.body)) if stream else reply.json
    assert answer["status"] == "incomplete"
    again = {**fields, "temperature": 0, "background": True}
    begun = client.post("/v1/responses", again).json
    while begun["status"] == "in_progress":
        begun = client.get(f"/v1/responses/{begun['id']}").json
    text = answer["output"][0]["content"][0]["text"]
    assert begun["output"][0]["content"][0]["text"] == text
    return text


@pytest.mark.parametrize("has_image", [False, True])
def test_one_conversation_has_one_answer(client, has_image):
    answers = [
        ask(client, stream, has_image)
        for ask in (chat, message, response)
        for stream in (False, True)
    ]
    assert answers[0]
    assert len(set(answers)) == 1
