"""Plan of the tree: who is whose child, also when members are lost and come back."""

import pytest

from trainer.supervise.network.tree_plan import Address, TreePlan

RANKS_PER_NODE = 4


def place(number: int) -> Address:
    return f"h{number}", number


@pytest.fixture
def plan() -> TreePlan:
    """Plan of a tree with four members on each of n0, n1 and n2; member 0 is the root."""
    plan = TreePlan("n0")
    for number in range(1, 3 * RANKS_PER_NODE):
        plan.parent(number, f"n{number // RANKS_PER_NODE}", place(number))
    return plan


def test_first_of_each_node_is_below_the_root_and_has_the_others_of_its_node_below() -> None:
    plan = TreePlan("n0")
    nodes = {1: "n0", 7: "n1", 4: "n1", 5: "n1", 8: "n2", 9: "n2"}
    parents = [plan.parent(number, node, place(number)) for number, node in nodes.items()]
    assert parents == [None, None, place(7), place(7), None, place(8)]
    assert plan.parent(7, "n1", place(7)) is None, "never its own parent"


def test_members_below_a_lost_one_are_known(plan: TreePlan) -> None:
    assert plan.below(4) == {5, 6, 7}
    assert plan.below(5) == set()
    assert plan.below(1) == set()
    assert plan.below(99) == set()


def test_next_of_a_node_takes_the_place_of_its_first_that_is_lost(plan: TreePlan) -> None:
    assert plan.parent(6, "n1", place(6)) == place(4), "its loss is not known yet"
    plan.forget(4)
    assert plan.parent(6, "n1", place(6)) is None
    assert plan.parent(5, "n1", place(5)) == place(6)
    assert plan.parent(4, "n1", place(44)) == place(6), "it comes back"
    assert plan.below(6) == {4, 5}


def test_loss_of_another_one_changes_nobodys_place(plan: TreePlan) -> None:
    plan.forget(5)
    assert plan.below(4) == {6, 7}
    assert plan.parent(5, "n1", place(55)) == place(4)


def test_successors_are_on_different_nodes_first() -> None:
    plan = TreePlan("a")
    for number, node in enumerate("aabbcc"):
        if number:
            plan.parent(number, node, place(number))
    assert [member for member, _ in plan.successors(4)] == [2, 4, 1, 3]
    assert plan.successors(4)[0] == (2, place(2))


def test_successors_are_children_of_the_root_before_those_below_them() -> None:
    plan = TreePlan("a")
    for number, node in [(3, "b"), (2, "b"), (1, "a")]:  # rank 3's supervisor came first on its node
        plan.parent(number, node, place(number))
    assert [member for member, _ in plan.successors(4)] == [3, 1, 2]


def test_members_that_were_in_the_tree_before_are_adopted() -> None:
    plan = TreePlan("n1")
    plan.adopt(3, "n3", place(3), 1)
    plan.adopt(7, "n3", place(7), 3)
    assert plan.below(3) == {7}
    assert plan.parent(99, "n3", place(99)) == place(3)
