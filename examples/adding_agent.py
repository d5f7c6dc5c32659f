r"""An agent that knows only the address of a server: it adds numbers by a tool, through the package `openai`.

    hpc-grpo train CONFIG \
        environment='{name: examples/adding_agent.py:AddingAgent, python: venv/bin/python, max_turns: 3}'

`venv` has whichever `openai` the agent likes. Rows have the chat messages of a question, and its answer.
"""

import json

from openai import OpenAI

NUMBER = {"type": "number"}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}


class AddingAgent:
    def play(self, row, seed, base_url, api_key):
        model = OpenAI(base_url=base_url, api_key=api_key)
        messages, tools = list(row["messages"]), [{"type": "function", "function": ADD}]
        while True:
            answer = model.chat.completions.create(model="any", messages=messages, tools=tools).choices[0].message
            if not answer.tool_calls:
                return float(row["answer"] in (answer.content or ""))
            messages.append(answer)
            for call in answer.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": added(call.function.arguments)})


def added(arguments):
    try:
        numbers = json.loads(arguments)
        return str(numbers["a"] + numbers["b"])
    except (KeyError, TypeError) as error:
        return f"Error: {error!r}"
