"""Open WebUI's retrieval: the code that calls an API, taken as it is from the files of the package.

The application itself needs a database and gigabytes of packages. So the definitions that send requests are compiled
alone, with the settings of a default installation.
"""

from __future__ import annotations

import ast
import importlib.metadata
import logging
import ssl
from pathlib import Path
from typing import Any, Optional

import aiohttp
import requests
from clients.python.checks import API, KEY, MODEL, check, main
from clients.python.search import DOCUMENTS, LONG, NEAREST, QUERY, RERANKER, nearest, require_equal, require_vectors
from clients.python.search import scores_of as expected_scores

PACKAGE = "open-webui"
SETTINGS: dict[str, Any] = {
    "Any": Any,
    "Optional": Optional,
    "List": list,
    "Tuple": tuple,
    "UserModel": object,
    "BaseReranker": object,
    "log": logging.getLogger(PACKAGE),
    "requests": requests,
    "aiohttp": aiohttp,
    "ENABLE_FORWARD_USER_INFO_HEADERS": False,
    "REQUESTS_VERIFY": True,
    "RAG_EMBEDDING_PREFIX_FIELD_NAME": None,
    "AIOHTTP_CLIENT_TIMEOUT": 60,
    "AIOHTTP_CLIENT_SESSION_SSL": ssl.create_default_context(),
}


def definitions_of(name: str, *names: str) -> None:
    """Compile definitions of a file of the package beside the ones before."""
    files = importlib.metadata.files(PACKAGE) or []
    path = next(Path(str(file.locate())) for file in files if file.as_posix() == f"open_webui/{name}")
    tree = ast.parse(path.read_text())
    tree.body = [one for one in tree.body if getattr(one, "name", None) in names]
    assert len(tree.body) == len(names), f"{path} has not all of {names}"
    exec(compile(tree, str(path), "exec"), SETTINGS)


definitions_of("utils/headers.py", "normalize_bearer_token", "bearer_auth_header", "get_json_bearer_headers")
definitions_of("retrieval/utils.py", "generate_openai_batch_embeddings", "agenerate_openai_batch_embeddings")
definitions_of("retrieval/models/external.py", "ExternalReranker")
embed, embed_beside = SETTINGS["generate_openai_batch_embeddings"], SETTINGS["agenerate_openai_batch_embeddings"]


@check
def texts_have_their_vectors() -> None:
    require_vectors(embed(MODEL, DOCUMENTS, API, KEY), DOCUMENTS)


@check
async def the_asynchronous_function_gets_the_same() -> None:
    require_vectors(await embed_beside(MODEL, DOCUMENTS, API, KEY), DOCUMENTS)


@check
def the_nearest_document_answers_the_query() -> None:
    query, *documents = embed(MODEL, [QUERY, *DOCUMENTS], API, KEY)
    assert nearest(query, documents) == NEAREST


@check
def the_external_reranker_scores_documents() -> None:
    reranker = SETTINGS["ExternalReranker"](KEY, f"{API}/rerank", RERANKER)
    require_equal(reranker.predict([(QUERY, text) for text in DOCUMENTS]), expected_scores())


@check
def a_text_beyond_the_limit_is_an_error() -> None:
    try:
        embed(MODEL, [LONG], API, KEY)
    except requests.HTTPError as error:
        assert error.response.status_code == 400
        assert "256" in error.response.text
    else:
        raise AssertionError("the text was embedded")


if __name__ == "__main__":
    main(PACKAGE)
