from scheduler.messages import Priority
from scheduler.ranking import Ranking
from scheduler.sequence import Sequence, Status
from tests.fakes import make_config, make_request


def make_sequence(number: int, priority: Priority, arrival_s: float = 100.0) -> Sequence:
    request = make_request(f"r{number}", priority=priority, arrival_s=arrival_s)
    return Sequence(request, number, arrival_s, 64)


def order(ranking: Ranking, now_s: float) -> list[int]:
    ranking.refresh(now_s)
    return [sequence.number for sequence in ranking.sequences]


def make_ranking(*sequences: Sequence) -> Ranking:
    ranking = Ranking(make_config(aging_s=10.0, max_preemptions=2))
    for sequence in sequences:
        ranking.add(sequence)
    return ranking


def test_class_first_then_arrival_then_number() -> None:
    ranking = make_ranking(
        make_sequence(0, Priority.LOW, 91.0),
        make_sequence(1, Priority.NORMAL),
        make_sequence(2, Priority.NORMAL, 95.0),
        make_sequence(3, Priority.HIGH),
        make_sequence(4, Priority.HIGH),
    )
    assert order(ranking, 100.0) == [3, 4, 2, 1, 0]


def test_a_waiting_sequence_ages_at_the_exact_second() -> None:
    ranking = make_ranking(
        make_sequence(0, Priority.LOW, 100.0), make_sequence(1, Priority.NORMAL, 105.0)
    )
    ranking.seat(ranking.sequences[1])
    ranking.sequences[1].stop_waiting(105.0)
    assert order(ranking, 109.9) == [1, 0]
    assert order(ranking, 110.0) == [0, 1]


def test_a_running_sequence_keeps_its_class_and_does_not_age() -> None:
    running = make_sequence(0, Priority.LOW, 100.0)
    ranking = make_ranking(running, make_sequence(1, Priority.HIGH, 130.0))
    ranking.seat(running)
    running.stop_waiting(111.0)
    assert order(ranking, 500.0) == [1, 0]
    assert running.rank[0] == 1


def test_stretches_of_waiting_add_up() -> None:
    sequence = make_sequence(0, Priority.LOW, 100.0)
    ranking = make_ranking(sequence)
    ranking.seat(sequence)
    sequence.stop_waiting(106.0)
    ranking.refresh(199.0)
    ranking.unseat(sequence, 200.0)
    ranking.refresh(203.9)
    assert sequence.rank[0] == 2
    ranking.refresh(204.0)
    assert sequence.rank[0] == 1


def test_a_capped_sequence_goes_to_the_front_of_its_class_only() -> None:
    capped = make_sequence(2, Priority.NORMAL)
    capped.num_preemptions = 2
    ranking = make_ranking(
        make_sequence(0, Priority.HIGH), make_sequence(1, Priority.NORMAL), capped
    )
    assert order(ranking, 100.0) == [0, 2, 1]


def test_seats_are_counted_through_all_changes() -> None:
    first, second = make_sequence(0, Priority.HIGH), make_sequence(1, Priority.HIGH)
    ranking = make_ranking(first, second)
    ranking.seat(first)
    ranking.seat(second)
    assert (ranking.num_running, ranking.num_waiting) == (2, 0)
    ranking.unseat(first, 100.0)
    ranking.remove(second)
    assert (ranking.num_running, ranking.num_waiting) == (0, 1)
    assert first.status is Status.WAITING
