"""Why a row of a source cannot become a prompt."""

REASONS = {
    "malformed_json": "the line is not JSON, or is nested too deeply",
    "undecodable": "the text is not UTF-8",
    "lone_surrogate": "a string holds half of a UTF-16 surrogate pair, which no UTF-8 text can hold",
    "not_an_object": "the line is JSON, but not an object",
    "no_known_shape": "none of the columns messages, conversations, turns, prompt",
    "empty": "no messages, a user message without text, or a message without content",
    "no_user_turn": "messages, but none from the user",
    "unknown_role": "a message from somebody else than system, user, assistant, tool",
    "system_not_first": "a system message that is not the first message",
    "bad_content": "a message that is not text, or a tool result without the call that it answers",
    "bad_tools": "tools or tool calls that are not in the OpenAI function schema",
    "bad_id": "an id that is neither a whole number nor text of 1 to 200 characters, none of them a control character",
    "too_long": "more characters than the limit",
    "duplicate_conversation": "the same messages and tools as an accepted prompt",
    "duplicate_id": "the id of an accepted prompt, with another conversation",
}


class Refusal(Exception):
    """A row cannot become a prompt: `reason`, a key of `REASONS`, and `detail`, what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")
