#!/usr/bin/env python3
"""Writes chats.json: conversations as the package `transformers` renders them with chat templates, and parts of the template
language with what Jinja makes of them. All templates are written here, in the manner of known families of models.

    pip install transformers==5.24.0 jinja2==3.1.6
    python tests/tokenizer/make_chats.py

With FOLDER… and --out FILE, writes all templates in these folders (*.jinja, and chat_template in *.json), unchanged, to that
file, for

    MICA_CHATS=FILE build/bin/mica_tests --gtest_filter=ChatFormat.RendersAsJinja

Folders with published templates: vendor/llama.cpp/models/templates in the source of llama-cpp-python, examples in that of
vllm. They are not ours and not stored in the repository.
"""

import argparse
import json
import sys
from pathlib import Path

import jinja2
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

TIME = 1767225600  # 1 January 2026, 00:00 UTC
DATE = "01 Jan 2026"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

CHATML = r"""{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA2 = r"""{% if messages[0]['role'] == 'system' %}
{% set loop_messages = messages[1:] %}
{% set system_message = '<<SYS>>\n' ~ messages[0]['content'] | trim ~ '\n<</SYS>>\n\n' %}
{% else %}
{% set loop_messages = messages %}
{% set system_message = '' %}
{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: user, assistant, user, assistant') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (system_message if loop.first else '') + message['content'].strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] | trim + ' ' + eos_token }}
{%- endif %}
{% endfor %}"""
LLAMA3 = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{#- The system message comes first. #}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {{- 'Functions, as {"name": …, "parameters": {…}}:\n\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("Only one call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = r"""{%- set ns = namespace(index=0, last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.index0 == ns.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{% else %}{{- "]" }}{% endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- ', "id": "' + "%09d" % ns.index + '"}' }}{% set ns.index = ns.index + 1 %}
            {%- else %}
                {{- ', "id": "' + tool_call.id + '"}' }}
            {%- endif %}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] in ["tool_results", "tool"] %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""
PHI = r"""{% for message in messages %}
{% if message['role'] in ('system', 'user') and message['content'] %}
{{'<|' ~ message['role'] ~ '|>
' + message['content'] + '<|end|>
'}}
{%- elif message['role'] == 'assistant' -%}
{{'<|assistant|>
' + message['content'] + '<|end|>
'}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}
"""
QWEN = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
MACROS = r"""{%- macro type_of(spec, depth=0) -%}
    {%- if spec.type == "object" -%}
        {%- if spec.properties -%}
            {
            {%- for name, inner in spec.properties|dictsort %}{{ name }}: {{ type_of(inner, depth + 1) }}{{ ", " if not loop.last }}{% endfor -%}
            }
        {%- else -%}any{{ depth }}{%- endif -%}
    {%- elif spec.enum is defined -%}{{ spec.enum | map("tojson") | join(" | ") }}
    {%- elif spec.type == "array" -%}{{ type_of(spec["items"], depth + 1) }}[]
    {%- else -%}{{ spec.type | default("any") | upper }}{%- endif -%}
{%- endmacro -%}
{%- macro turn(role) -%}<|{{ role | capitalize }}|>{{ caller() | trim }}<|END|>{%- endmacro -%}
{{ bos_token }}
{%- if tools %}
{% for tool in tools %}
def {{ tool.function.name }}({{ type_of(tool.function.parameters) }}): # {{ tool.function.description | replace("\n", " ") }}
{% endfor %}
{% endif %}
{%- for message in messages if message.content is not none -%}
{%- call turn(message.role) %}  {{ message.content }}  {% endcall -%}
{%- generation %}{% set loop_index = loop.index %}{{ loop_index }}/{{ loop.length }}{% endgeneration -%}
{%- endfor -%}
{%- filter upper %} end {{ messages | selectattr("role", "equalto", "user") | list | length }}{% endfilter -%}
{%- with role = "assistant" %}{% if add_generation_prompt %}<|{{ role }}|>{% endif %}{% endwith -%}"""

TEMPLATES = {"ChatML": CHATML, "Llama 2": LLAMA2, "Llama 3": LLAMA3, "Mistral": MISTRAL, "Gemma": GEMMA, "Phi": PHI, "Qwen": QWEN,
             "Macros": MACROS}
S, U, A, T = "system", "user", "assistant", "tool"
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather\nof a \"city\" <&'é>",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Its name"}, "days": {"type": "array", "items": {"type": "integer"}},
        "unit": {"enum": ["°C", "°F"]}}, "required": ["city"]}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}}
CALL = {"tool_calls": [{"id": "abcdef123", "type": "function",
                        "function": {"name": "weather", "arguments": {"city": "Rome", "days": [1, 2.5, 1e-7], "z": None, "b": True}}}]}
CALLS = {"tool_calls": [*CALL["tool_calls"], {"type": "function", "function": {"name": "clock", "arguments": {}}}]}
CONVERSATIONS = [
    ([(U, " Hi\n")], None),
    ([(S, "Be brief.\n"), (U, "\u00a0\u2003x\u3000 \u001c\n")], None),
    ([(U, "1"), (A, " 2\n"), (U, "3")], None),
    ([(S, "Be brief."), (U, "1"), (A, "2"), (U, "3"), (A, "4"), (U, "5")], None),
    ([(U, "1"), (A, "2"), (S, "Be brief."), (U, "3"), (A, "\n4")], None),
    ([(U, "1"), (A, "<think>\nhm\n</think>\n\n2"), (U, "3")], None),
    ([(U, "1"), (A, "<think>\n\nhm\n\n</think>\n\n2\n")], None),
    ([(U, "1"), (A, "\n2"), (U, "<tool_response>\n3\n</tool_response>"), (A, "\n4"), (S, "Be brief."), (A, "5")], None),
    ([(A, "1"), (U, "2")], None),
    ([(S, "Be brief.")], None),
    ([(U, "Weather?")], [WEATHER]),
    ([(S, "Be brief."), (U, "Weather?"), (A, "", CALL), (T, '{"temperature": 20.5}', {"name": "weather"}), (A, "Fine."), (U, "Thanks")], [WEATHER, CLOCK]),
    ([(U, "Both?"), (A, "Wait.", CALLS), (T, "rain"), (T, "12:00"), (A, "It rains at noon.", {"reasoning_content": "\nhm\n"})], [CLOCK, WEATHER]),
]
# (conversation, tools, add_generation_prompt, enable_thinking)
CASES = [(*each, prompt, True) for each in CONVERSATIONS for prompt in (True, False)] + [(*CONVERSATIONS[0], True, False)]

DATA = {"text": "  Hello, wörld 😀  ", "empty": "", "n": 7, "x": 2.5, "none": None, "yes": True, "list": [3, 1, 2], "words": ["b", "A", "c", "a"],
        "dict": {"b": 1, "a": [1, {"c": "d"}], "items": 5}, "rows": [{"name": "x", "v": 2, "ok": True}, {"name": "y", "v": 1, "ok": False}, {"name": "z", "v": 2}],
        "lines": "a\n\n  b\r\nc", "quote": "it's \"q\" \\ \t\u00e9\u2028"}
# Parts of the language. Each is rendered with DATA.
SNIPPETS = r"""
{{ text }}|{{ text | trim }}|{{ text.strip() | length }}|{{ text[2:7] }}|{{ text[::-1] }}|{{ text[-3] }}|{{ text[100:] }}|{{ text[:3:-2] }}
{{ none }} {{ yes }} {{ x }} {{ n / 2 }} {{ n // 2 }} {{ n % 4 }} {{ -n // 2 }} {{ -n % 4 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ n * x }} {{ 1e20 }} {{ 1e-7 }} {{ 10.0 }} {{ 7 / 7 }}
{{ list }} {{ words }} {{ dict }} {{ (1,) }} {{ (1, 'a') }} {{ [] }} {{ {} }} {{ {'a': none} }} {{ [true, 1.5, "it's"] }}
{{ quote }} {{ [quote] }} {{ quote | tojson }} {{ dict | tojson }} {{ dict | tojson(indent=2) }} {{ [] | tojson(indent=2) }} {{ list | tojson(separators=(',', ':')) }} {{ dict | tojson(sort_keys=true) }} {{ text | tojson(ensure_ascii=true) }}
{{ undefined_name }}|{{ dict.nothing }}|{{ undefined_name is defined }}|{{ undefined_name | default('d') }}|{{ empty | default('d') }}|{{ empty | default('d', true) }}|{{ none | d('e', boolean=true) }}
{{ undefined_name.x }}
{{ undefined_name + 'x' }}
{{ 'a' + 1 }}
{{ 'a' ~ 1 ~ none ~ 2.0 }}
{{ 1 if false }}|{{ 'a' if n > 5 else 'b' }}|{{ 'x' if undefined_name else 'y' if yes else 'z' }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ [1, 2] == [1, 2] }} {{ [1] < [2] }} {{ (1, 2) == [1, 2] }} {{ yes == 1 }}
{{ 1 < 'a' }}
{{ 'a' in 'abc' }} {{ 'a' in words }} {{ 'a' not in dict }} {{ 3 in list }} {{ 'x' in undefined_name }} {{ not 1 in list }}
{{ yes and 'a' }} {{ empty or 'b' }} {{ none and 1 }} {{ not none }} {{ not yes or yes }}
{% for x in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('o', 'e') }}{{ loop.changed(x) }} {% endfor %}
{% for a, b in dict.items() %}{{ a }}={{ b }};{% endfor %}{% for k in dict %}{{ k }}{% endfor %}{% for c in 'añ' %}[{{ c }}]{% endfor %}{% for x in [] %}{% else %}none{% endfor %}{% for x in undefined_name %}{% else %}no{% endfor %}
{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x > 5 %}{% break %}{% endif %}{{ x }}{% endfor %} {{ range(3) | list }} {{ range(5, 1, -2) | list }} {{ range(1, 4) | sum }}
{% for x in list if x > 1 %}{{ loop.index }}:{{ x }}/{{ loop.length }} {% endfor %}
{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}@{{ loop.depth }}{% endif %}{% endfor %}
{% set a = 1 %}{% for x in list %}{% set a = x %}{{ a }}{% endfor %}{{ a }}{% if yes %}{% set a = 5 %}{% endif %}{{ a }}
{% set ns = namespace(n=0, l=[]) %}{% for x in list %}{% set ns.n = ns.n + x %}{% set ns.l = ns.l + [x] %}{% endfor %}{{ ns.n }} {{ ns.l }} {{ ns.missing }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set t = (1, 2) %}{{ t }}{% set c %}x{{ a }}y{% endset %}[{{ c }}]{% set d | upper | trim %} x {% endset %}[{{ d }}]
{% set list.x = 1 %}
{% macro m(a, b='B', c=a) %}({{ a }}|{{ b }}|{{ c }}|{{ varargs }}|{{ kwargs }}){% endmacro %}{{ m(1) }}{{ m(1, 2, 3, 4) }}{{ m(b=5) }}{{ m(1, z=6) }}{{ m is callable }}
{% macro f(n) %}{{ n if n < 2 else (f(n - 1) | int + f(n - 2) | int) }}{% endmacro %}{{ f(10) }}
{% macro dialog(title) %}<{{ title }}>{{ caller(1, 'u') }}{% endmacro %}{% call(a, b) dialog('T') %}{{ a }}{{ b }}{{ n }}{% endcall %}
{% set v = 1 %}{% macro g() %}{{ v }}{% endmacro %}{% set v = 2 %}{{ g() }}{% for x in [9] %}{% set v = x %}{{ g() }}{% endfor %}
{{ text.upper() }} {{ text.lower() }} {{ 'ab cd'.title() }} {{ 'aB'.capitalize() }} {{ 'x,y,,z'.split(',') }} {{ ' a  b '.split() }} {{ 'a b c'.split(' ', 1) }} {{ 'a-b-c'.rsplit('-', 1) }} {{ lines.splitlines() }}
{{ 'xxabxx'.strip('x') }} {{ 'xxabxx'.lstrip('x') }} {{ 'xxabxx'.rstrip('xb') }} {{ 'abc'.replace('b', 'BB') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'ab'.replace('', '-') }} {{ 'abcabc'.find('c') }} {{ 'abc'.rfind('z') }} {{ 'aXbX'.count('X') }} {{ '-'.join(['a', 'b']) }}
{{ 'abc'.startswith('ab') }} {{ 'abc'.startswith(('x', 'a')) }} {{ 'abc'.endswith('bc') }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ '12'.isdigit() }} {{ 'a1'.isalnum() }} {{ 'ab'.isalpha() }} {{ ' '.isspace() }} {{ 'AB'.isupper() }} {{ 'a=b=c'.partition('=') }} {{ '7'.zfill(3) }} {{ 'a'.ljust(3) }}| {{ 'a'.center(5, '*') }}
{{ dict.keys() | list }} {{ dict.values() | list }} {{ dict.get('a') }} {{ dict.get('z') }} {{ dict.get('z', 4) }} {{ dict['items'] }} {{ dict.b }} {{ dict['a'][1].c }} {{ dict.a.0 }} {{ list.index(1) }} {{ list.count(3) }} {{ dict | length }} {{ dict | list }}
{{ list | sort }} {{ words | sort }} {{ words | sort(case_sensitive=true) }} {{ list | sort(reverse=true) }} {{ rows | sort(attribute='v') | map(attribute='name') | join(',') }} {{ dict | dictsort | first }} {{ words | unique | list }} {{ list | min }} {{ list | max }} {{ words | max }}
{{ rows | map(attribute='name') | list }} {{ rows | map(attribute='ok', default='?') | list }} {{ words | map('upper') | join }} {{ rows | selectattr('ok') | map(attribute='name') | list }} {{ rows | selectattr('v', 'eq', 2) | list | length }} {{ rows | rejectattr('ok', 'defined') | list }} {{ list | select('odd') | list }} {{ list | reject('gt', 1) | list }} {{ rows | sum(attribute='v') }}
{% for v, group in rows | groupby('v') %}{{ v }}:{{ group | map(attribute='name') | join }};{% endfor %} {{ list | batch(2) | list }} {{ list | batch(2, 'f') | list }} {{ list | reverse | list }} {{ 'abc' | reverse }} {{ list | first }} {{ list | last }} {{ 'abc' | list }} {{ [] | first }}
{{ 'a b' | title }} {{ 'AB cd' | capitalize }} {{ '<a & "b">' | e }} {{ 'a' | center(5) }}| {{ lines | indent }} {{ lines | indent(2, true) }} {{ lines | indent('>', blank=true) }} {{ 'ab cd' | wordcount }} {{ 'x' | replace('x', 'y') }} {{ 3 | string }} {{ ' a ' | trim }} {{ 'xax' | trim('x') }}
{{ '12' | int }} {{ 'z' | int }} {{ 'z' | int(5) }} {{ 3.9 | int }} {{ '1.5' | float }} {{ 'q' | float(2.0) }} {{ 2.567 | round(2) }} {{ 2.5 | round }} {{ 2.1 | round(0, 'ceil') }} {{ -3 | abs }} {{ '%s-%d-%.2f-%5s|%-5s|%05d' | format('a', 3, 2.5, 'b', 'c', 42) }} {{ 'é' | length }} {{ '{} {1} {a}'.format(1, 2, a=3) if false else '{} {}'.format(1, 'x') }}
{{ 1 is odd }} {{ 2 is even }} {{ 9 is divisibleby 3 }} {{ 'a' is string }} {{ 1 is number }} {{ true is number }} {{ 1 is integer }} {{ true is integer }} {{ 1.0 is float }} {{ dict is mapping }} {{ list is sequence }} {{ 'a' is iterable }} {{ none is none }} {{ true is true }} {{ 1 is true }} {{ false is boolean }} {{ 'a' is lower }} {{ 'A' is upper }} {{ 1 is eq 1 }} {{ 1 is sameas true }} {{ 1 is in list }} {{ 1 is not in [2] }} {{ 3 is gt 2 }} {{ x is undefined }} {{ n is not none and n > 3 }}
a {%- if yes %} b {% endif -%} c {# comment #} d {{- ' e ' -}} f {%+ if yes %} g{%+ endif %}
{% if yes %}  {# c #}  x{% endif %}{% raw %}{{ raw }} {% x %}{% endraw %}{%- raw -%} y {%- endraw -%} z
{{ "a\nb\t\"\x41\u00e9\\" }} {{ 'it''s' }} {{ 1_000 }} {{ "a" "b" }} {{ 'a' * 3 }} {{ [1] * 2 }} {{ [1] + [2] }} {{ {'a': 1, 'a': 2} }} {{ "%s" % 'x' }} {{ "%s %s" % (1, 2) }}
{{ raise_exception('stop ' ~ n) }}
{{ strftime_now('%Y-%m-%d') }} {{ namespace(a=1).a }} {{ dict2 | default(dict) | length }}
{{ list.append(4) }}
{{ ''.__class__ }}
{{ range(1000000) }}
{{ nothing() }}
{{ 'a' | nothing }}
{{ 1 // 0 }}
{% for x in 5 %}{% endfor %}
{{ [1, 2][5] }}|{{ 'abc'[1] }}|{{ list[-1] }}|{{ list[1:] }}|{{ list[:-1] }}|{{ list[::2] }}|{{ (1, 2, 3)[1:] }}
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}{% filter upper | trim %} q {{ n }} {% endfilter %}
{{ not_closed
{% if yes %}
{% endfor %}
{{ 1 + }}
{% nothing %}
{% set x = 'tab\there' -%}   {{ x }}{{- '' }}   {{ x -}}
{{ (text | trim).split(', ')[0] | lower ~ '!' }} {{ -n | abs }} {{ n - 1 - 1 }} {{ 2 * 3 + 4 }} {{ 2 + 3 * 4 }} {{ (2 + 3) * 4 }} {{ 'a' ~ 'b' == 'ab' }} {{ -2 ** 2 }}
""".strip("\n").split("\n")


def render(template, **variables):
    chat_template_utils.datetime = Now
    return render_jinja_template([variables.pop("messages")], chat_template=template, **variables)[0][0]


class Now:
    @staticmethod
    def now():
        import datetime
        return datetime.datetime.fromtimestamp(TIME, datetime.timezone.utc)


def message_of(role, content, others=None):
    return {"role": role, "content": content, **(others or {})}


def entry(name, template):
    def text(messages, tools, prompt, thinking):
        try:
            return render(template, messages=[message_of(*m) for m in messages], tools=tools, add_generation_prompt=prompt,
                          enable_thinking=thinking, date_string=DATE, **NAMES)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError):
            return None  # an error
    return {"name": name, "template": template, "texts": [text(*case) for case in CASES]}


def snippet(template):
    try:
        return {"template": template, "text": render(template, messages=[message_of(U, "x")], **DATA)}
    except Exception:
        return {"template": template, "text": None}


def templates_in(folders):
    for folder in folders:
        for path in sorted(folder.rglob("*.jinja")):
            yield path.name, path.read_text()
        for path in sorted(folder.rglob("*.json")):
            try:
                template = json.loads(path.read_text()).get("chat_template")
            except (ValueError, AttributeError):
                continue
            if isinstance(template, str):
                yield str(path), template


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "chats.json")
    options = parser.parse_args()
    compact = lambda value: json.dumps(value, ensure_ascii=False)
    templates = dict(templates_in(options.folders)) if options.folders else TEMPLATES
    cases = [{"messages": [[role, content, compact(others[0]) if others else ""] for role, content, *others in messages],
              "tools": compact(tools) if tools else "", "prompt": prompt, "thinking": thinking}
             for messages, tools, prompt, thinking in CASES]
    result = {"date": DATE, "time": TIME, "config": NAMES, "cases": cases, "data": compact(DATA), "snippets": [snippet(s) for s in SNIPPETS],
              "templates": [entry(name, template) for name, template in templates.items()]}
    options.out.write_text(json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{len(templates)} templates, {sum(t is not None for e in result['templates'] for t in e['texts'])} texts, "
          f"{sum(s['text'] is None for s in result['snippets'])} of {len(SNIPPETS)} snippets are errors")


if __name__ == "__main__":
    sys.exit(main())
