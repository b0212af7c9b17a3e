#!/usr/bin/env python3
"""Writes chats.json: conversations as the package `transformers` renders them with the chat templates of models.

FOLDER has the published templates: models/templates in the source of llama.cpp (here from llama-cpp-python 0.3.36). They
are not ours and not stored in the repository. Instead, chats.json has templates written here, without tools, after a
check that they render the same. FOLDER lacks those of SmolLM, of the first Llama 3, and of the Qwen 3 models that always
think; these are written from their descriptions.

    pip install transformers==5.23.0 jinja2==3.1.6
    python tests/tokenizer/make_chats.py FOLDER

With a file name after FOLDER, writes all templates of FOLDER, unchanged, to that file, for

    MICA_CHATS=FILE build/bin/mica_tests --gtest_filter=ChatFormat.RendersAsJinja
"""

import json
import sys
from pathlib import Path

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

LLAMA = r"""{%- for message in messages %}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
CHATML = r"""{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"""
PROMPT = r"""{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
DEFAULT = r"""{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nTEXT<|im_end|>\n' }}{% endif %}"""
EACH = "{% for message in messages %}" + CHATML + "{% endfor %}"
ANSWER = r"""{% set parts = message.content.split('</think>') %}
{% set content = parts[-1].lstrip('\n') if parts | length > 1 else message.content %}
{% set reasoning_content = parts[0].rstrip('\n').split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > question.at and (loop.last or (not loop.last and reasoning_content)) %}
{{- '<think>\n' + reasoning_content + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}
{{- content }}
{%- endif %}
{{- '<|im_end|>\n' }}"""
QUESTION = r"""{% set question = namespace(at=messages | length - 1) %}
{% for message in messages if message.role == 'user' and not (message.content.startswith('<tool_response>') and
message.content.endswith('</tool_response>')) %}
{% set question.at = messages.index(message) %}
{% endfor %}"""
# An example of a template that uses ChatML's tokens differently: the last answer keeps its thoughts.
OTHER_ANSWER = r"""{% set last_part = message.content.split('</think>')[-1].lstrip('\n') %}
{{- '<|im_start|>assistant\n' + (message.content if loop.last else last_part) + '<|im_end|>\n' }}"""


def by_role(answer):
    return ("{% for message in messages %}{% if message.role == 'assistant' %}" + answer + "{% else %}" + CHATML +
            "{% endif %}{% endfor %}")


GEMMA = r"""{{ bos_token }}
{%- for message in messages %}
{%- if message.role != ['user', 'assistant'][loop.index0 % 2] %}
{{- raise_exception('System role not supported, and roles must alternate') }}
{%- endif %}
{{- '<start_of_turn>' + message.role.replace('assistant', 'model') + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


# (model, its files in FOLDER, whether mica supports it, a template that renders the same)
TEMPLATES = [
    ("SmolLM", [], True,  # whose line ends are no escapes
     (DEFAULT.replace("TEXT", "You are a helpful AI assistant named SmolLM, trained by Hugging Face") + EACH +
      PROMPT).replace(r"\n", "\n")),
    ("Llama 3", [], True, "{{ bos_token }}" + LLAMA),
    ("Llama 3.1", [f"meta-llama-Llama-{model}-Instruct" for model in ("3.1-8B", "3.2-3B", "3.3-70B")], True,
     r"""{{ bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n' }}
{{- 'Today Date: ' + date_string + '\n\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content | trim }}
{%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
""" + LLAMA),
    ("Qwen 2.5", ["Qwen-Qwen2.5-7B-Instruct"], True,
     DEFAULT.replace("TEXT", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.") + EACH + PROMPT),
    ("Qwen 3", ["Qwen-Qwen3-0.6B"], True, QUESTION + by_role(ANSWER) + PROMPT +
     r"""{% if add_generation_prompt and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"""),
    ("Qwen 3, thinking only", [], True,
     QUESTION + by_role(ANSWER) + PROMPT.replace(r"\n", r"\n<think>\n")),
    ("Gemma 2", ["google-gemma-2-2b-it"], True, GEMMA),
    ("QwQ", ["Qwen-QwQ-32B"], False, by_role(OTHER_ANSWER) + r"""{% if add_generation_prompt %}
{{- '<|im_start|>assistant\n<think>\n' + ('' if enable_thinking else '</think>') }}
{%- endif %}"""),
    ("Functionary", ["meetkai-functionary-medium-v3.1"], False, r"""{{ bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\n\n\nCutting Knowledge Date: December 2023\n\n<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""),
]
S, U, A = "system", "user", "assistant"
CONVERSATIONS = [
    [(U, " Hi\n")],
    [(S, "Be brief.\n"), (U, "\u00a0\u2003x\u3000 \u001c\n")],
    [(U, "1"), (A, " 2\n"), (U, "3")],
    [(S, "Be brief."), (U, "1"), (A, "2"), (U, "3"), (A, "4"), (U, "5")],
    [(U, "1"), (A, "2"), (S, "Be brief."), (U, "3"), (A, "\n4")],
    [(U, "1"), (A, "<think>\nhm\n</think>\n\n2"), (U, "3")],
    [(U, "1"), (A, "<think>\n\nhm\n\n</think>\n\n2\n")],
    [(U, "1"), (A, "<think>x</think>2</think>3"), (A, "\n4"), (A, "5")],
    [(U, "1"), (A, "\n2"), (U, "<tool_response>\n3\n</tool_response>"), (A, "\n4"), (S, "Be brief."), (A, "5")],
    [(A, "1"), (U, "2")],
    [(A, "1")],
    [(S, "Be brief.")],
]
DATE = "01 Jan 2026"
# (conversation, add_generation_prompt, enable_thinking)
CASES = [(messages, prompt, True) for messages in CONVERSATIONS for prompt in (True, False)]
CASES.append((CONVERSATIONS[0], True, False))


def entry(name, supported, template):
    bos = "<bos>" if "<start_of_turn>" in template else "<|begin_of_text|>"

    def text(messages, prompt, thinking):
        messages = [{"role": role, "content": content} for role, content in messages]
        try:
            return render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt,
                                         enable_thinking=thinking, date_string=DATE, bos_token=bos)[0][0]
        except jinja2.TemplateError:
            if "System role not supported" not in template:
                raise
            return None  # roles that Gemma 2 refuses

    return {"name": name, "supported": supported, "template": template, "texts": [text(*case) for case in CASES]}


def written(folder):
    for name, files, supported, template in TEMPLATES:
        result = entry(name, supported, template)
        for file in files:
            if entry(name, supported, (folder / f"{file}.jinja").read_text())["texts"] != result["texts"]:
                sys.exit(f"{file}.jinja and the template written for {name} differ")
        yield result


def published(folder):
    all_supported = [file for _, files, supported, _ in TEMPLATES if supported for file in files]
    for path in sorted(folder.glob("*.jinja")):
        try:
            yield entry(path.stem, path.stem in all_supported, path.read_text())
        except Exception as error:  # many want other roles or other arguments
            print(f"{path.name} does not render: {error}")


def main():
    folder = Path(sys.argv[1])
    path, entries = ((Path(sys.argv[2]), published(folder)) if len(sys.argv) > 2 else
                     (Path(__file__).parent / "chats.json", written(folder)))
    result = {"date": DATE, "cases": CASES, "templates": list(entries)}
    path.write_text(json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
