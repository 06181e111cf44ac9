"""Chat templates against transformers' apply_chat_template, and what a broken or hostile one may do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from scheduler_svc.text.chat_template import ChatTemplate, TemplateError
from tests.scheduler import tiny_tokenizers

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    # SmolLM2's own: a default system message, no trimming
    "smollm2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # Llama 2's kind: BOS, strict order of roles, the system message inside the first user message, trimmed content
    "roles": """\
{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = false %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' '  + content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}
""",
    # Llama 3's kind: attribute access, `trim`, whitespace control, macros and namespaces
    "headers": """\
{{- bos_token }}
{%- macro header(role) -%}<|start_header_id|>{{ role }}<|end_header_id|>{%- endmacro %}
{%- set ns = namespace(count=0) %}
{%- for message in messages if message.role in ('user', 'assistant', 'system') %}
{%- set ns.count = ns.count + 1 %}
{{- header(message.role) }}\n\n{{ message.content | trim }}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}\n\n{% endif %}
{{- '' if ns.count else 'nobody spoke' }}
""",
    # Tools and JSON: `tojson`, undefined names, tests, loop controls, dictionaries
    "json": """\
{%- if tools is not none and tools %}[TOOLS]{{ tools | tojson }}{% endif %}
{%- if documents is defined and documents %}[DOCS]{% endif %}
{{- unk_token }}
{%- for message in messages %}
{%- if message.role == 'tool' %}{% continue %}{% endif %}
{{ message | tojson(indent=2) }}{{ {'b': 1, 'a': [none, true, '<é&>']} | tojson(sort_keys=true) }}
{%- endfor %}
{{- '>' if add_generation_prompt else '' }}
""",
    # SmolLM3's kind: the assistant's part in a generation block, and a date
    "generation": """\
Today is {{ strftime_now('%Y') | length }} digits.
{% for message in messages %}
{%- set role = message['role'] %}
<|{{ role }}|>
{% if role == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message['content'] }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
""",
}
USER = {"role": "user", "content": '  What is 1 < 2 & "3"?\n'}
ANSWER = {"role": "assistant", "content": "It is é 👍. "}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = [[USER], [SYSTEM, USER], [USER, ANSWER], [SYSTEM, USER, ANSWER, USER], [USER, ANSWER, USER, ANSWER]]


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level(), **SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda messages: "-".join(m["role"] for m in messages))
def test_prompts_are_those_of_transformers(oracle: Any, name: str, messages: list[dict[str, str]]) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    for add_prompt in (True, False):
        expected = oracle.apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=add_prompt
        )
        assert template.render(messages, add_generation_prompt=add_prompt) == expected
    assert template.render(messages) == template.render(messages, add_generation_prompt=True)


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"json"}))
@pytest.mark.parametrize("content", ["Sure, the", "Sure, the \n", "a", "é 👍"])
def test_continued_messages_are_those_of_transformers(oracle: Any, name: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    expected = oracle.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
    )
    prompt = ChatTemplate(TEMPLATES[name], SPECIAL).render(messages, continue_final_message=True)
    assert prompt == expected
    assert prompt.rstrip().endswith(content.rstrip())
    assert messages[-1]["content"] == content


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    with pytest.raises(TemplateError, match="does not show the final message"):
        ChatTemplate("{{ messages[0].role }}", {}).render([USER], continue_final_message=True)
    with pytest.raises(TemplateError, match="no text to continue"):
        ChatTemplate("x", {}).render([{"role": "assistant"}], continue_final_message=True)
    with pytest.raises(TemplateError, match="exclude each other"):
        ChatTemplate("x", {}).render([USER], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(TemplateError, match="no messages"):
        ChatTemplate("x", {}).render([])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TEMPLATES["roles"], "Conversation roles must alternate"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{% if %}", r"Expected an expression.*\(line 1\)"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate"),
        ("{{ messages[7].content.x }}", "has no element 7"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe|undefined"),
        ("{{ messages.__class__.__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_whatever_a_template_does_is_one_line(source: str, message: str) -> None:
    template = ChatTemplate(source, SPECIAL)
    with pytest.raises(TemplateError) as error:
        template.render([ANSWER])
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)
    assert str(error.value).startswith("chat template: ")


def test_variables_are_the_callers_but_for_those_with_a_meaning() -> None:
    template = ChatTemplate("{{ bos_token }}{{ tone|default('plain') }}: {{ messages[0].content }}", SPECIAL)
    messages = [{"role": "user", "content": "hi"}]
    assert template.with_variables({"tone": "warm"}).render(messages) == "<s>warm: hi"
    assert template.render(messages) == "<s>plain: hi", "the template itself stays as it is"
    for name in ("messages", "add_generation_prompt", "bos_token"):
        with pytest.raises(TemplateError, match=f"'{name}' from elsewhere"):
            template.with_variables({name: "x"})


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [dict(USER)]
    with pytest.raises(TemplateError):
        ChatTemplate("{% set _ = messages[0].update({'role': 'system'}) %}", {}).render(messages)
    assert messages == [USER]
