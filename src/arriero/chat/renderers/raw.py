"""The renderer of models without a chat template: the messages' texts, and nothing else."""

from __future__ import annotations

from arriero.chat.messages import Conversation, Think
from arriero.chat.renderers.prompt import Prompt, Text
from arriero.errors import UnsupportedFeature


class RawRenderer:
    """Joins the contents of all messages with blank lines; the model simply continues the text."""

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = True, think: Think = None) -> Prompt:
        """Raises UnsupportedFeature for tools and images, which need a template."""
        if conversation.tools or any(message.tool_calls for message in conversation.messages):
            raise UnsupportedFeature("this model has no chat template, so it can't be given tools")
        if any(message.images for message in conversation.messages):
            raise UnsupportedFeature("this model has no chat template, so it can't be given images")
        contents = [message.content for message in conversation.messages if message.content]
        return Prompt([Text("\n\n".join(contents), control=False)])
