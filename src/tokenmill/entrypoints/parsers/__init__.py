"""Answers to messages: reasoning, content, and calls of tools.

    answer.py      `AnswerParser`: one answer, from its first piece of text to its last
    events.py      what parsers find, and how it is put together
    reader.py      text that comes in pieces, read by generators
    reasoning.py   `<think>` and its relatives
    json_text.py   JSON as it comes
    json_calls.py, section_calls.py, pythonic.py, xml_calls.py, harmony.py
                   the families of models
    registry.py    the families by name, and how a template tells which one it is
    grammar.py     grammars that let a model write nothing but calls; grammar_writer.py: its rules

Nothing here knows HTTP or the engine; text comes from a detokenizer, so characters are whole.
"""
