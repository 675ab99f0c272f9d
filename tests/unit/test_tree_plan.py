"""Plan of the tree when members are lost and come back."""

from trainer.supervise.network.tree_plan import Address, TreePlan


def place(number: int) -> Address:
    return f"h{number}", number


def grown(members: int, fanout: int = 2) -> TreePlan:
    """Plan of a tree with a member on each node, all below the root, member 0."""
    plan = TreePlan("n0", fanout)
    for number in range(1, members):
        plan.parent(f"n{number}", place(number), number)
    return plan


def test_members_below_a_lost_one_are_known() -> None:
    plan = grown(15)
    assert plan.below(1) == {3, 4, 7, 8, 9, 10}
    assert plan.below(3) == {7, 8}
    assert plan.below(14) == set()


def test_those_below_a_lost_member_find_another_parent_and_take_along_whom_they_have() -> None:
    plan = grown(15)
    plan.forget(1)
    assert plan.parent("n3", place(3), 3) is None, "the root has room again"
    parent = plan.parent("n4", place(4), 4)
    assert parent not in (place(1), place(4), place(9), place(10)), "none that is lost or below itself"
    assert plan.below(3) >= {7, 8}


def test_those_below_a_lost_member_do_not_wait_for_each_other() -> None:
    plan = TreePlan("n0", 1)  # a chain: the root, 1, 2, 3; and the node of 3 has others
    for number in (1, 2, 3):
        plan.parent(f"n{number}", place(number), number)
    plan.forget(1)
    plan.parent("n9", place(9), 9)
    assert plan.parent("n2", place(2), 2) == place(9), "3 has room, but no way to the root yet"


def test_lost_member_that_comes_back_does_not_get_below_those_it_had() -> None:
    plan = grown(15)
    plan.forget(3)
    assert plan.parent("n3", place(3), 3) not in (place(7), place(8))


def test_successors_are_on_different_nodes_first() -> None:
    plan = TreePlan("a", 2)
    for number, node in enumerate("aabbcc"):
        if number:
            plan.parent(node, place(number), number)
    assert [member for member, _ in plan.successors(4)] == [2, 4, 1, 3]
    assert plan.successors(4)[0] == (2, place(2))


def test_successors_are_children_of_the_root_before_those_below_them() -> None:
    plan = TreePlan("a", 2)
    for number, node in [(3, "b"), (2, "b"), (1, "a")]:  # rank 3's supervisor came first on its node
        plan.parent(node, place(number), number)
    assert [member for member, _ in plan.successors(4)] == [3, 1, 2]


def test_members_that_were_in_the_tree_before_are_adopted() -> None:
    plan = TreePlan("n1", 2)
    plan.adopt(3, "n3", place(3), 1)
    plan.adopt(7, "n7", place(7), 3)
    assert plan.below(3) == {7}
    assert plan.parent("n3", place(99), 99) == place(3)
