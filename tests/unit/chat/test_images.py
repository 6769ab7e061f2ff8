"""Conversations with images: which marks a prompt has, and which of them stand for images."""

from __future__ import annotations

import pytest

from helpers.chat_templates import CHATML as BY_CONCATENATION
from helpers.fake_engine import tiny_tokenizer
from helpers.pictures import MARK, MARK_ID, as_file, data_url, image_url, picture, tiny_images
from helpers.tiny_text import CHATML
from helpers.tokenizers import sentencepiece_tokenizer
from tokenmill.entrypoints.chat.content_forms import content_forms
from tokenmill.entrypoints.chat.render import render_chat
from tokenmill.errors import ChatTemplateError, InvalidRequestError

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    + MARK
    + "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)
"""A template that takes a string or parts."""
PARTS_ONLY = (
    "{% for m in messages %}{% for part in m.content | selectattr('type', 'equalto', 'image') %}"
    + MARK
    + "\n{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
)
"""One that writes nothing for a string."""
URL = data_url(as_file(picture()))


def render(*content, template=CHATML, role="user", images=True, **more):
    messages = [{"role": role, "content": list(content)}]
    return render_messages(messages, template=template, images=images, **more)


def render_messages(messages, *, template=CHATML, images=True, **more):
    given = tiny_images(max_images=4) if images is True else images
    return render_chat(
        tiny_tokenizer(),
        messages,
        chat_template=template,
        images=given,
        add_generation_prompt=False,
        **more,
    )


def text(words):
    return {"type": "text", "text": words}


def num_marks(rendered):
    return rendered.token_ids.count(MARK_ID)


@pytest.mark.parametrize(
    ("template", "takes_text", "takes_parts"),
    [
        (CHATML, True, False),
        (BY_CONCATENATION, True, False),
        (PARTS, True, True),
        (PARTS_ONLY, False, True),
        ("{{ messages[0].content | tojson }}", True, False),
        ("{{ messages | tojson }}", True, False),
        ("{{ 'nothing' }}", True, False),
        ("{{ raise_exception('no') }}", True, False),
    ],
)
def test_forms_of_contents_are_seen_by_trying(template, takes_text, takes_parts):
    forms = content_forms(template)
    assert (forms.takes_text, forms.takes_parts) == (takes_text, takes_parts)


def test_a_template_of_strings_gets_the_family_s_mark():
    rendered = render(text("Look:"), text("here"), image_url(URL), text("What?"), image_url(URL))
    body = f"Look:\nhere{MARK}\nWhat?{MARK}\n"
    assert rendered.text == f"<|im_start|>user\n{body}<|im_end|>\n"
    assert rendered.token_ids == tiny_tokenizer().encode(rendered.text)
    assert [each.source for each in rendered.images] == [URL, URL]
    wheres = [each.where for each in rendered.images]
    assert wheres == [f"messages[0].content[{i}].image_url" for i in (2, 4)]


def test_a_template_of_parts_writes_marks_itself():
    rendered = render(text("a"), image_url(URL), text("b"), template=PARTS)
    assert rendered.text == f"<|im_start|>user\na{MARK}b<|im_end|>\n"
    assert num_marks(rendered) == len(rendered.images) == 1
    without = render(text("a"), text("b"), template=PARTS)
    assert without.text == "<|im_start|>user\na\nb<|im_end|>\n"


def test_a_template_of_parts_alone_gets_no_strings():
    rendered = render(text("a"), image_url(URL), template=PARTS_ONLY)
    assert rendered.text == f"{MARK}\na<|im_end|>"
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    expected = "one<|im_end|>two<|im_end|>"
    assert render_messages(messages, template=PARTS_ONLY).text == expected
    assert render_messages(messages, template=PARTS_ONLY, images=None).text == expected
    # Some look at the first part of every message.
    first = "{% for m in messages %}{{ m.content[0].type }}|{% endfor %}" + PARTS_ONLY
    silent = [{"role": "user", "content": ""}, {"role": "assistant", "content": None}]
    assert render_messages(silent, template=first).text.startswith("text|text|")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "image", "image": URL},
        {"type": "image", "url": URL},
        {"type": "image_pil", "image_pil": picture()},
        {"type": "image", "image": picture()},
    ],
)
def test_every_form_of_an_image(part):
    (found,) = render(part).images
    assert found.source == URL or found.source.size == picture().size


@pytest.mark.parametrize(
    ("part", "parameter"),
    [
        ({"type": "image_url"}, ".image_url"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "4k"}}, ".image_url.detail"),
        ({"type": "image"}, ".image"),
        ({"type": "image_pil", "image_pil": None}, ".image_pil"),
        ({"type": "video_url", "video_url": {"url": URL}}, ".type"),
        ({"type": ["image_url"]}, ".type"),
    ],
)
def test_parts_of_another_form_are_refused(part, parameter):
    with pytest.raises(InvalidRequestError) as caught:
        render(text("a"), part)
    assert caught.value.parameter == f"messages[0].content[1]{parameter}"


def test_a_model_without_images_says_so():
    with pytest.raises(InvalidRequestError, match="takes text only") as caught:
        render(image_url(URL), images=None)
    assert caught.value.parameter == "messages[0].content[0].type"


def test_b116_images_of_a_conversation_are_counted():
    messages = [{"role": "user", "content": [image_url(URL)]}] * 5
    with pytest.raises(InvalidRequestError, match="5 images, but a prompt takes 4"):
        render_messages(messages)


@pytest.mark.parametrize("template", [CHATML, PARTS, PARTS_ONLY, BY_CONCATENATION])
def test_b058_a_mark_that_a_user_writes_is_plain_text(template):
    words = f"x{MARK}y{MARK}"
    rendered = render(text(words), image_url(URL), text(MARK), template=template)
    assert num_marks(rendered) == 1
    assert rendered.text.count(MARK) == 4
    assert tiny_tokenizer().decode(rendered.token_ids) == rendered.text
    (place,) = [i for i, each in enumerate(rendered.token_ids) if each == MARK_ID]
    before = tiny_tokenizer().decode(rendered.token_ids[:place])
    # The one that stands for the image is where the image was.
    assert before.count(MARK) == (0 if template == PARTS_ONLY else 2)


@pytest.mark.parametrize("images", [0, 1])
def test_b058_wherever_a_user_writes_it(images):
    words = f"{MARK} tools"
    template = "{{ tools | tojson }}{{ extra }}{{ messages[1].name }}" + PARTS
    messages = [
        {"role": "system", "content": words},
        {"role": "user", "content": [text("?")] + [image_url(URL)] * images, "name": MARK},
    ]
    rendered = render_messages(
        messages,
        template=template,
        tools=[{"type": "function", "function": {"name": MARK, MARK: [MARK]}}],
        chat_template_kwargs={"extra": words},
    )
    assert num_marks(rendered) == images
    assert rendered.text.count(MARK) == 6 + images
    assert tiny_tokenizer().decode(rendered.token_ids) == rendered.text


@pytest.mark.parametrize("cut", [1, 5, len(MARK) - 1])
def test_b058_a_mark_in_two_pieces_is_no_image(cut):
    parts = [text("a" + MARK[:cut]), text(MARK[cut:] + "b")]
    with pytest.raises(InvalidRequestError, match="cannot be written as plain text"):
        render(*parts, image_url(URL), template=PARTS)
    assert num_marks(render(*parts, image_url(URL))) == 1  # a line break is between them


def test_b058_text_that_only_begins_like_a_mark_stays_as_it_is():
    words = "if a <"
    rendered = render(text(words), image_url(URL), text(words + "|"), template=PARTS)
    assert rendered.text == f"<|im_start|>user\n{words}{MARK}{words}|<|im_end|>\n"
    assert rendered.token_ids == tiny_tokenizer().encode(rendered.text)


def test_b058_on_a_vocabulary_of_another_kind():
    tokenizer, images = sentencepiece_tokenizer(), tiny_images()
    images.mark_token, images.mark_token_id = "</s>", tokenizer.token_to_id("</s>")
    images.mark_text = "</s>"
    messages = [{"role": "user", "content": [text("a</s>b"), image_url(URL)]}]
    rendered = render_chat(tokenizer, messages, chat_template=CHATML, images=images)
    assert rendered.token_ids.count(images.mark_token_id) == 1
    as_it_was = tokenizer.encode(rendered.text, add_special_tokens=False)
    assert as_it_was.count(images.mark_token_id) == 2
    assert tokenizer.decode(rendered.token_ids) == tokenizer.decode(as_it_was)


def test_b058_without_images_texts_have_the_ids_that_they_had():
    messages = [{"role": "user", "content": "One two <|im_start|> three"}]
    assert render_messages(messages).token_ids == render_messages(messages, images=None).token_ids


@pytest.mark.parametrize("template", [PARTS.replace(MARK, ""), PARTS.replace(MARK, MARK * 2)])
def test_b058_a_template_that_leaves_images_out_or_doubles_them(template):
    count = template.count(MARK)
    with pytest.raises(ChatTemplateError, match=f"written {count} image marks for 1 images"):
        render(image_url(URL), template=template)


@pytest.mark.parametrize("template", [CHATML, PARTS, PARTS_ONLY])
@pytest.mark.parametrize("last", [text("It is"), image_url(URL)])
def test_a_message_with_an_image_is_continued(template, last):
    rendered = render(text("a"), last, template=template, continue_final_message=True)
    assert rendered.text.endswith("It is" if last["type"] == "text" else (MARK, MARK + "\n", "a"))
    assert num_marks(rendered) == len(rendered.images)


def test_special_tokens_are_added_when_asked_for():
    rendered = render(image_url(URL), add_special_tokens=True)
    assert rendered.token_ids == tiny_tokenizer().encode(rendered.text, add_special_tokens=True)
