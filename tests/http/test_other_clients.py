"""Other clients than the official one, each in an environment of its own: their pins clash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer

pytestmark = pytest.mark.slow

ANSWER = "user\nHi\nassistant\n"
"""What the scripted engine answers to "Hi"."""


@pytest.fixture(scope="module")
def server():
    with LiveServer(served_model_name=["tiny"], api_key=["sk-test"]) as server:
        yield server


def run(command, directory, **environment):
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_with(directory, requirement):
    """An interpreter that has the requirement and nothing of ours."""
    run([sys.executable, "-m", "venv", "venv"], directory)
    python = str(directory / "venv" / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", requirement], directory)
    return python


def script(server, text):
    return textwrap.dedent(text).replace("BASE", repr(f"{server.url}/v1"))


def test_langchain(server, tmp_path):
    python = python_with(tmp_path, "langchain-openai>=1,<3")
    code = script(
        server,
        """
        import json
        from langchain_openai import ChatOpenAI, OpenAI
        chat = ChatOpenAI(base_url=BASE, api_key="sk-test", model="tiny", max_retries=0)
        whole = chat.invoke("Hi")
        pieces = list(chat.stream("Hi"))
        batch = chat.batch(["Hi", "Hi"])
        text = OpenAI(base_url=BASE, api_key="sk-test", model="tiny").invoke("One two")
        print(json.dumps({
            "whole": whole.content,
            "usage": whole.usage_metadata["total_tokens"],
            "finish": whole.response_metadata["finish_reason"],
            "stream": "".join(piece.content for piece in pieces),
            "batch": [each.content for each in batch],
            "text": text,
        }))
        """,
    )
    found = json.loads(run([python, "-c", code], tmp_path))
    assert found.pop("usage") > 0
    assert found == {
        "whole": ANSWER,
        "finish": "stop",
        "stream": ANSWER,
        "batch": [ANSWER, ANSWER],
        "text": "One two",
    }


def tells_the_time(prompt_token_ids, params):
    """Asks for the time, until its prompt has it."""
    has_it = "5 o'clock" in tiny_tokenizer().decode(prompt_token_ids)
    call = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
    return Script(tiny_tokenizer().encode("It is 5 o'clock." if has_it else f"Wait. {call}"))


def test_tools_with_langchain(tmp_path):
    python = python_with(tmp_path, "langchain-openai>=1,<3")
    engine = FakeEngine(tells_the_time, max_model_len=4096)
    with LiveServer(engine, served_model_name=["tiny"], tool_call_parser="hermes") as server:
        code = script(
            server,
            """
            import json
            from langchain_core.messages import HumanMessage, ToolMessage
            from langchain_core.tools import tool
            from langchain_openai import ChatOpenAI
            from pydantic import BaseModel, Field

            @tool
            def now(zone: str) -> str:
                "The time in a zone."
                return f"5 o'clock {zone}"

            chat = ChatOpenAI(base_url=BASE, api_key="x", model="tiny", max_retries=0)
            found = {}
            for name in ("invoke", "stream"):
                asking, messages = chat.bind_tools([now]), [HumanMessage("What time is it?")]
                while True:
                    if name == "invoke":
                        answer = asking.invoke(messages)
                    else:
                        first, *pieces = asking.stream(messages)
                        answer = sum(pieces, first)
                    messages.append(answer)
                    if not answer.tool_calls:
                        break
                    for call in answer.tool_calls:
                        result = now.invoke(call["args"])
                        messages.append(ToolMessage(result, tool_call_id=call["id"]))
                found[name] = [message.content for message in messages]

            class Now(BaseModel):
                "The time."
                zone: str = Field(description="where")

            Now.__name__ = "now"
            forced = chat.with_structured_output(Now, method="function_calling")
            found["forced"] = forced.invoke("What time is it?").zone
            print(json.dumps(found))
            """,
        )
        found = json.loads(run([python, "-c", code], tmp_path))
    turns = ["What time is it?", "Wait.", "5 o'clock UTC", "It is 5 o'clock."]
    assert found == {"invoke": turns, "stream": turns, "forced": "UTC"}


def test_litellm(server, tmp_path):
    python = python_with(tmp_path, "litellm>=1.80,<3")
    code = script(
        server,
        """
        import json
        import litellm
        fields = {"api_base": BASE, "api_key": "sk-test", "num_retries": 0}
        hi = [{"role": "user", "content": "Hi"}]
        whole = litellm.completion(model="openai/tiny", messages=hi, **fields)
        stream = litellm.completion(model="openai/tiny", messages=hi, stream=True, **fields)
        pieces = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        text = litellm.text_completion(
            model="text-completion-openai/tiny", prompt="One two", **fields
        )
        errors = []
        for model, more in (("openai/other", {}), ("openai/tiny", {"temperature": 9})):
            try:
                litellm.completion(model=model, messages=hi, **fields, **more)
            except Exception as error:
                errors.append(type(error).__name__)
        print(json.dumps({
            "whole": whole.choices[0].message.content,
            "stream": pieces,
            "text": text.choices[0].text,
            "errors": errors,
        }))
        """,
    )
    output = run([python, "-c", code], tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert json.loads(output.splitlines()[-1]) == {
        "whole": ANSWER,
        "stream": ANSWER,
        "text": "One two",
        "errors": ["NotFoundError", "BadRequestError"],
    }


def test_llm(server, tmp_path):
    python = python_with(tmp_path, "llm>=0.26,<2")
    home = tmp_path / "home"
    home.mkdir()
    (home / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: tiny\n  api_base: {server.url}/v1\n  api_key_name: mine\n"
        f"- model_id: plain\n  model_name: tiny\n  api_base: {server.url}/v1\n"
        f"  api_key_name: mine\n  completion: true\n"
    )
    (home / "keys.json").write_text('{"mine": "sk-test"}')

    def ask(*arguments):
        return run([python, "-m", "llm", *arguments], tmp_path, LLM_USER_PATH=str(home))

    assert ask("-m", "mine", "Hi").strip() == ANSWER.strip()
    assert ask("-m", "mine", "--no-stream", "Hi").strip() == ANSWER.strip()
    assert ask("-m", "mine", "-s", "Be brief", "Hi").strip().startswith("system\nBe brief")
    assert ask("-m", "plain", "One two").strip() == "One two"


def test_node(server, tmp_path):
    (tmp_path / "package.json").write_text('{"type": "module"}')
    run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "openai@>=6"], tmp_path)
    (tmp_path / "session.mjs").write_text(
        script(
            server,
            """
            import OpenAI from "openai";
            const client = new OpenAI({ baseURL: BASE, apiKey: "sk-test", maxRetries: 0 });
            const messages = [{ role: "user", content: "Hi" }];
            const whole = await client.chat.completions.create({ model: "tiny", messages });
            let stream = "", usage = null;
            for await (const chunk of await client.chat.completions.create({
              model: "tiny", messages, stream: true, stream_options: { include_usage: true },
            })) {
              stream += chunk.choices[0]?.delta?.content ?? "";
              usage = chunk.usage ?? usage;
            }
            const helper = client.chat.completions.stream({ model: "tiny", messages });
            const final = await helper.finalContent();
            const text = await client.completions.create({ model: "tiny", prompt: "One two" });
            const models = [];
            for await (const model of client.models.list()) models.push(model.id);
            const errors = [];
            for (const more of [{ model: "other" }, { model: "tiny", temperature: 9 }]) {
              try {
                await client.chat.completions.create({ messages, ...more });
              } catch (error) {
                errors.push([error.constructor.name, error.status, error.code, error.param]);
              }
            }
            console.log(JSON.stringify({
              whole: whole.choices[0].message.content, stream, final,
              usage: usage.total_tokens === whole.usage.total_tokens,
              text: text.choices[0].text, models, errors,
            }));
            """,
        )
    )
    assert json.loads(run(["node", "session.mjs"], tmp_path)) == {
        "whole": ANSWER,
        "stream": ANSWER,
        "final": ANSWER,
        "usage": True,
        "text": "One two",
        "models": ["tiny"],
        "errors": [
            ["NotFoundError", 404, "model_not_found", "model"],
            ["BadRequestError", 400, "invalid_request_error", "temperature"],
        ],
    }


def test_node_with_the_other_dialects(server, tmp_path):
    (tmp_path / "package.json").write_text('{"type": "module"}')
    packages = ["openai@>=6", "@anthropic-ai/sdk@>=1"]
    run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *packages], tmp_path)
    (tmp_path / "session.mjs").write_text(
        script(
            server,
            """
            import Anthropic from "@anthropic-ai/sdk";
            import OpenAI from "openai";
            const options = { apiKey: "sk-test", maxRetries: 0 };
            const claude = new Anthropic({ baseURL: BASE.slice(0, -3), ...options });
            const messages = [{ role: "user", content: "Hi" }];
            const fields = { model: "tiny", max_tokens: 200, messages };
            const whole = await claude.messages.create(fields);
            const final = await claude.messages.stream(fields).finalMessage();
            const count = await claude.messages.countTokens({ model: "tiny", messages });
            const errors = [];
            for (const more of [{ model: "other" }, { temperature: 9 }]) {
              try {
                await claude.messages.create({ ...fields, ...more });
              } catch (error) {
                errors.push([error.constructor.name, error.status, error.type]);
              }
            }
            const openai = new OpenAI({ baseURL: BASE, ...options });
            const first = await openai.responses.create({ model: "tiny", input: "Hi" });
            const stream = openai.responses.stream({ model: "tiny", input: "Hi" });
            const last = (await stream.finalResponse()).output_text;
            const second = await openai.responses.create({
              model: "tiny", input: "So?", previous_response_id: first.id,
            });
            const items = [];
            for await (const item of openai.responses.inputItems.list(first.id)) {
              items.push(item.type);
            }
            console.log(JSON.stringify({
              whole: whole.content[0].text, final: final.content[0].text, reason: final.stop_reason,
              count: count.input_tokens === whole.usage.input_tokens, errors,
              first: first.output_text, last, second: second.output_text.includes("So?"), items,
            }));
            """,
        )
    )
    assert json.loads(run(["node", "session.mjs"], tmp_path)) == {
        "whole": ANSWER,
        "final": ANSWER,
        "reason": "end_turn",
        "count": True,
        "errors": [
            ["NotFoundError", 404, "not_found_error"],
            ["BadRequestError", 400, "invalid_request_error"],
        ],
        "first": ANSWER,
        "last": ANSWER,
        "second": True,
        "items": ["message"],
    }
