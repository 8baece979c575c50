"""LangGraph: a graph of a model and its tools, over chat completions and over the Responses API."""

from __future__ import annotations

from typing import Any

from clients.python.checks import API, KEY, MODEL, check, main
from clients.python.river import ASK_LENGTH, length_of
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

length_tool = tool(length_of)


def graph_of(**options: Any) -> Any:
    """Return a graph that calls the tool first and then answers."""
    llm = ChatOpenAI(model=MODEL, base_url=API, api_key=KEY, temperature=0, max_retries=0, max_tokens=200, **options)

    def answer(state: MessagesState) -> dict[str, Any]:
        is_first = state["messages"][-1].type == "human"
        choice = "length_of" if is_first else "none"
        return {"messages": [llm.bind_tools([length_tool], tool_choice=choice).invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([length_tool]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    return graph.compile(checkpointer=InMemorySaver())


@check
def forced_call_runs_the_tool_and_a_second_request_answers() -> None:
    for options in ({}, {"use_responses_api": True}):
        state = graph_of(**options).invoke(
            {"messages": [HumanMessage(ASK_LENGTH)]}, {"configurable": {"thread_id": "1"}}
        )
        kinds = [message.type for message in state["messages"]]
        assert kinds == ["human", "ai", "tool", "ai"], kinds
        assert state["messages"][1].tool_calls[0]["args"]["name"] in state["messages"][1].tool_calls[0]["args"].values()
        assert state["messages"][2].content.endswith(" km"), state["messages"][2]
        assert state["messages"][3].text


@check
def streamed_graph_has_the_call_and_goes_on_in_a_thread() -> None:
    graph, thread = graph_of(stream_usage=True), {"configurable": {"thread_id": "2"}}
    for _ in range(2):
        pieces = [
            piece for piece, _ in graph.stream({"messages": [HumanMessage(ASK_LENGTH)]}, thread, stream_mode="messages")
        ]
        assert any(getattr(piece, "tool_call_chunks", ()) for piece in pieces)
    assert len(graph.get_state(thread).values["messages"]) == 8


if __name__ == "__main__":
    main("langgraph", "langchain-openai")
