"""Chat templates as families write them: the text that is trained, and of it, token by token, what is learned."""

import re

import pytest

from hf_hotspa.errors import DataError
from hf_hotspa.rows.chat_text import ChatTemplate
from hf_hotspa.rows.formats import Chat, read_messages
from tests.chat_templates import bracketed, tokenizer_for

# Short templates that do what those of the families do; `[` and `]` in what is expected stand around what is learned.
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLIT = (  # `t`: the thinking of message m, in a field or in its text; `c`: its answer
    "{% set t = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '') %}"
    "{% set c = m.content.split('</think>')[-1].lstrip('\n') %}"
)
# An answer keeps its thinking (an empty one, where there is none) only behind the last question.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n" + SPLIT
    + "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or t) %}<think>\n{{ t.strip() }}\n</think>\n\n"
    "{% endif %}{{ c }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)  # fmt: skip
QWEN3_THINKING = QWEN3.replace("(loop.last or t)", "true").replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", "<think>\n"
)
DEEPSEEK = (  # takes the thinking out of every answer, and its prompt opens it
    "{{ bos_token }}{% for m in messages %}" + SPLIT + "{% if m.role == 'user' %}<|User|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}<|Assistant|>{{ c }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)  # fmt: skip
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (  # strict about the roles, the system message before the first question
    "{{ bos_token }}{% set talk = messages[1:] if messages[0].role == 'system' else messages %}{% for m in talk %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if loop.first and talk != messages %}{{ messages[0].content }}\n\n{% endif %}{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (  # no generation prompt; the system message stands before the last question
    "{% set talk = messages[1:] if messages[0].role == 'system' else messages %}{{ bos_token }}{% for m in talk %}"
    "{% if m.role == 'user' %}[INST] {% if talk != messages and loop.index0 >= talk | length - 2 %}{{ messages[0].content }}\n\n"
    "{% endif %}{{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PHI3 = (  # the EOS token behind the whole
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GPT_OSS = (  # the last answer has an end of its own, and only it its thinking
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role != 'assistant' %}<|message|>{{ m.content }}<|end|>"
    "{% elif loop.last %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM = (  # nothing ends an answer but the token of the next role
    "{# <|user|> #}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMOLLM3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TALK = [("user", "hi"), ("assistant", "yes"), ("user", "so"), ("assistant", "no")]
SYSTEM = [("system", "Short!"), *TALK]
THINKING = [("user", "hi"), ("assistant", "yes", "Hm"), ("user", "so"), ("assistant", "no", "Ah")]

CASES = {
    "chatml": (CHATML, TALK, (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[yes<|im_end|>]\n"
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[no<|im_end|>]\n")),
    "qwen3": (QWEN3, TALK, (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nyes<|im_end|>]\n"
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nno<|im_end|>]\n")),
    "qwen3, thinking": (QWEN3, THINKING, (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[<think>\nHm\n</think>\n\nyes<|im_end|>]\n"
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[<think>\nAh\n</think>\n\nno<|im_end|>]\n")),
    "qwen3-thinking": (QWEN3_THINKING, THINKING, (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n[Hm\n</think>\n\nyes<|im_end|>]\n"
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n<think>\n[Ah\n</think>\n\nno<|im_end|>]\n")),
    "deepseek-r1-distill": (DEEPSEEK, THINKING, (
        "<bos><|User|>hi<|Assistant|><think>\n[Hm\n</think>\n\nyes<eos>]<|User|>so<|Assistant|><think>\n[Ah\n</think>\n\nno<eos>]")),
    "deepseek-r1-distill, no thinking": (DEEPSEEK, TALK, (
        "<bos><|User|>hi<|Assistant|><think>\n[\n</think>\n\nyes<eos>]<|User|>so<|Assistant|><think>\n[\n</think>\n\nno<eos>]")),
    "llama3": (LLAMA3, SYSTEM, (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nShort!<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[yes<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nso<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[no<|eot_id|>]")),
    "gemma": (GEMMA, SYSTEM, (
        "<bos><start_of_turn>user\nShort!\n\nhi<end_of_turn>\n<start_of_turn>model\n[yes<end_of_turn>]\n"
        "<start_of_turn>user\nso<end_of_turn>\n<start_of_turn>model\n[no<end_of_turn>]\n")),
    "mistral": (MISTRAL, TALK, "<bos>[INST] hi [/INST][ yes</s>][INST] so [/INST][ no</s>]"),
    "mistral, system": (
        MISTRAL, SYSTEM, "<bos>[INST] Short!\n\nhi [/INST][ yes</s>][INST] Short!\n\nso [/INST][ no</s>]"),
    "phi3": (PHI3, TALK, (
        "<|user|>\nhi<|end|>\n<|assistant|>\n[yes<|end|>]\n<|user|>\nso<|end|>\n<|assistant|>\n[no<|end|>\n<eos>]")),
    "gpt-oss": (GPT_OSS, THINKING, (
        "<|start|>user<|message|>hi<|end|><|start|>assistant[<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
        "<|channel|>final<|message|>yes<|return|>]<|start|>user<|message|>so<|end|><|start|>assistant"
        "[<|channel|>analysis<|message|>Ah<|end|><|start|>assistant<|channel|>final<|message|>no<|return|>]")),
    "glm": (GLM, TALK, "<|user|>\nhi<|assistant|>[\nyes<|user|>]\nso<|assistant|>[\nno<|user|>]"),
    "smollm3": (SMOLLM3, TALK, (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[yes<|im_end|>]\n"
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[no<|im_end|>]\n")),
}  # fmt: skip


def chat(messages, trained=None, **fields):
    talk = [
        dict(zip(("role", "content", "reasoning_content"), m, strict=False)) if isinstance(m, tuple) else m
        for m in messages
    ]
    talk = read_messages(talk, "messages", 7)
    turns = tuple(i for i, m in enumerate(talk) if m["role"] == "assistant")
    return Chat(talk, turns if trained is None else trained, **fields)


def written(template, conversation, merges=()):
    """The text that is trained, with brackets around the tokens that are learned."""
    tokenizer = tokenizer_for(template, merges)
    [(ids, learned)] = ChatTemplate(tokenizer).tokens([conversation], [7])
    return bracketed(tokenizer, ids, learned)


@pytest.mark.parametrize("name", CASES)
def test_every_answer_is_learned_as_the_template_writes_it_when_it_is_the_last(name):
    template, talk, expected = CASES[name]
    assert written(template, chat(talk)) == expected


@pytest.mark.parametrize("name", [name for name in CASES if "deepseek" not in name])
def test_each_prefix_is_what_the_template_asks_and_what_is_to_come(name):
    """Up to the first answer, and with one answer, the text is the template's own: the model sees it so in use."""
    template, talk, _ = CASES[name]
    until = next(i for i, message in enumerate(talk) if message[0] == "assistant") + 1
    tokenizer, first = tokenizer_for(template), chat(talk[:until])
    [(ids, learned)] = ChatTemplate(tokenizer).tokens([first], [0])
    asked = tokenizer.apply_chat_template(first.messages[:-1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(first.messages, tokenize=False)
    assert tokenizer.decode(ids[: learned.index(True)]) == asked
    assert tokenizer.decode(ids).startswith(whole)


def test_only_the_turns_that_count_are_laid_out():
    expected = CASES["qwen3"][2].replace("[<think>\n\n</think>\n\nyes<|im_end|>]", "yes<|im_end|>")
    assert written(QWEN3, chat(TALK, (3,))) == expected  # the first answer as the template has it in history
    assert written(SMOLLM3, chat(TALK, (3,))) == CASES["smollm3"][2].replace("[yes<|im_end|>]", "yes<|im_end|>")
    assert not any("[" in written(template, chat(TALK[:1])) for template in (CHATML, SMOLLM3))


def test_tool_calls_and_options_of_the_template():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}]}
    talk = [TALK[0], call, {"role": "tool", "content": "noon"}, *TALK[1:]]
    assert written(QWEN3, chat(talk)) == (
        '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\n<tool_call>clock{"zone": "UTC"}</tool_call>'
        "<|im_end|>]\n<|im_start|>user\nnoon<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nyes<|im_end|>]\n"
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nno<|im_end|>]\n"
    )
    assert written(QWEN3, chat(TALK[:2], options={"enable_thinking": False})) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[yes<|im_end|>]\n"
    )


def test_a_conversation_that_the_assistant_begins():
    assert written(QWEN3, chat(TALK[1:])).startswith("<|im_start|>assistant\n[<think>\n\n</think>\n\nyes<|im_end|>]\n")
    with pytest.raises(DataError, match=r"failed on 1 messages.*roles must alternate.*dataset row 7.*check the roles"):
        written(GEMMA, chat(TALK[1:]))


def test_a_token_across_the_border_of_an_answer_is_learned():
    newline = "\u010a"
    expected = CASES["chatml"][2].replace("assistant\n[yes", "assistant[\n\nyes")
    assert written(CHATML, chat([TALK[0], ("assistant", "\nyes"), *TALK[2:]]), [(newline, newline)]) == expected


def test_blank_tokens_without_offsets_are_learned_too():
    from tokenizers import processors

    tokenizer = tokenizer_for(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    [(ids, learned)] = ChatTemplate(tokenizer).tokens([chat([TALK[0], ("assistant", "a \n\n b")])], [0])
    assert tokenizer.decode([i for i, counts in zip(ids, learned, strict=True) if counts]) == "a \n\n b<|im_end|>"


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (CHATML, chat(THINKING), "leaves out the thinking of the assistant in message 1.*row 7"),
        (CHATML, chat(TALK, tools=[{"name": "clock"}]), "'tools', and the chat template has no place"),
        (DEEPSEEK, chat([("critic", "Wrong answer"), *TALK]), "leaves out what 'critic' says in message 0"),
        (QWEN3, chat([*TALK[:1], ("assistant", "yes", "Hm")], options={"enable_thinking": False}),
         "turn 1 of the conversation has thinking.*enable_thinking"),
        (CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}"), chat(TALK),
         "does not show which tokens turn 1 of the conversation.*row 7.*generation"),
        (SMOLLM3.replace("{{ m.content }}<|im_end|>{% endgeneration %}", "{% endgeneration %}{{ m.content }}<|im_end|>"),
         chat(TALK), "markers of the chat template mark nothing of turn 1"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_write_is_refused_by_name(template, conversation, message):
    with pytest.raises(DataError, match=message):
        written(template, conversation)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        *((template, None) for template in (CHATML, LLAMA3, GEMMA, PHI3, GLM, SMOLLM3)),
        (
            QWEN3,
            r"rewrites answers.*Trained: .*<think>\\n\\n</think>\\n\\nGood morning.*own text.*assistant\\nGood morning",
        ),
        (GPT_OSS, r"rewrites answers.*Good morning<\|return\|>.*Good morning<\|end\|>"),
        (CHATML.replace("<|im_end|>", "").replace("<|im_start|>", "## "), "no special token.*not learn to stop"),
        (
            SMOLLM3.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
            r"leave the token '<\|im_end\|>'",
        ),
    ],
)
def test_what_is_said_of_a_template(template, says):
    found = ChatTemplate(tokenizer_for(template)).statement()
    if says is None:
        assert found is None
    else:
        assert re.search(says, found, re.DOTALL), found
