"""What one engine alone is asked, so that it can be compared with an answer that was served."""

from infra.demo.reference_engine import parts_of
from infra.story.story import Story
from schemas.records import Retrieved, Sampling, WorkPhase
from schemas.rules.tokens import pack_tokens, unpack_tokens
from tests.infra.story.story_records import work
from tests.streams.builders import request


def probe(number: int, seq: int, *tokens: int) -> Retrieved:
    ids = pack_tokens(tokens)
    return Retrieved(
        request_id="r1", session_id="s-r1", router_id="d", asked_ms=1, at_ms=2,
        probe=number, seq=seq, tokens=ids,
    )  # fmt: skip


def engine_requests(story: Story) -> list[tuple[list[int], int, int]]:
    return [
        (
            list(unpack_tokens(part.prompt_tokens)),
            part.sampling.max_tokens,
            part.sampling.min_tokens,
        )
        for part in parts_of(story)
    ]


def answered_story(*probes: Retrieved) -> Story:
    sampling = Sampling(max_tokens=10, min_tokens=5, seed=7)
    story = Story(request("r1", tokens=2, sampling=sampling), retrieved=list(probes))
    story.token_ids = [10, 11, 12, 13, 14, 15]
    return story


def test_story_without_probes_is_one_part() -> None:
    assert engine_requests(answered_story()) == [([0, 1], 10, 5)]


def test_story_is_split_where_probe_inserted_tokens() -> None:
    """The first record of each probe counts; a probe without results splits nothing."""
    story = answered_story(probe(2, 4, 91), probe(1, 3, 90), probe(1, 3, 99), probe(3, 5))
    assert engine_requests(story) == [
        ([0, 1], 3, 3),
        ([0, 1, 10, 11, 12, 90], 1, 1),
        ([0, 1, 10, 11, 12, 90, 13, 91], 6, 1),
    ]


def test_story_parts_begin_with_prompt_of_worker() -> None:
    story = answered_story()
    story.work = [work(WorkPhase.DECODE, "decode-0", 0, prompt_tokens=pack_tokens([7, 8, 9]))]
    assert engine_requests(story) == [([7, 8, 9], 10, 5)]
