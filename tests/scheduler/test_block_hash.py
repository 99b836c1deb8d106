from scheduler.block_hash import BlockHasher


def test_a_digest_has_128_bits_and_depends_on_tokens_parent_and_salt() -> None:
    hasher = BlockHasher(2, b"key")
    root = hasher.root("")
    first = hasher.child(root, [1, 2])
    assert len(first) == 16
    assert first == hasher.child(root, [1, 2])
    others = {
        hasher.child(root, [2, 1]),
        hasher.child(hasher.root("a"), [1, 2]),
        hasher.child(first, [1, 2]),
    }
    assert len(others | {first}) == 4


def test_a_salt_that_spells_out_a_block_does_not_meet_that_block() -> None:
    hasher = BlockHasher(1, b"key")
    root = hasher.root("")
    spelled = (root + (65).to_bytes(4, "little")).decode("latin-1")
    assert hasher.root(spelled) != hasher.child(root, [65])
    assert hasher.root("ab") != hasher.root("a")


def test_digests_cannot_be_foreseen_without_the_key() -> None:
    assert BlockHasher(1, b"a").root("") != BlockHasher(1, b"b").root("")


def test_a_salt_may_hold_a_lone_surrogate() -> None:
    hasher = BlockHasher(1, b"key")
    assert hasher.root("\ud800") != hasher.root("")
