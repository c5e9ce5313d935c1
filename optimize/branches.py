"""Moves the branches of an If into the main graph, where the rewrites see them, and back.

optimum's merged decoders are one If: a branch without past, and one with it.
"""

from collections import defaultdict

import onnx_ir as ir

from . import graph as g

_MOVED = "its branches are in the main graph"


def is_moved(node: ir.Node) -> bool:
    """Whether the branches of an If are in the main graph; those that it has just name their results."""
    return _MOVED in node.meta


def move_out(model: ir.Model) -> None:
    """Moves the nodes of the branches of each If of the main graph into it, unless all are constants."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "If" and not node.domain]:
        if all(inner.op_type in ("Constant", "Identity") for each in g.subgraphs(node) for inner in each):
            continue
        node.meta[_MOVED] = True
        for branch in g.subgraphs(node):
            for name, value in list(branch.initializers.items()):
                del branch.initializers[name]
                graph.register_initializer(value)
            inner = list(branch)
            branch.remove(inner)
            graph.insert_before(node, inner)
            for index, value in enumerate(tuple(branch.outputs)):
                named = ir.node("Identity", [value])
                named.outputs[0].type, named.outputs[0].shape = value.type, value.shape
                branch.append(named)
                branch.outputs[index] = named.outputs[0]


def move_back(model: ir.Model) -> None:
    """Moves nodes that only one branch needs into it. What both need stays in the main graph."""
    graph = model.graph
    for node in [node for node in graph if is_moved(node)]:
        del node.meta[_MOVED]
        branches = g.subgraphs(node)
        others = ((each, inner) for each in graph if each is not node for inner in g.subgraphs(each))
        owners = {deep: each for each, inner in others for deep in inner.all_nodes()}
        place, moved = dict[ir.Node, ir.Graph](), defaultdict[ir.Graph, list[ir.Node]](list)
        for each in reversed(graph):
            users = [owners.get(use.node, use.node) for value in each.outputs for use in value.uses()]
            graphs = {place.get(user, user.graph) for user in users}
            if len(graphs) == 1 and not any(value.is_graph_output() for value in each.outputs):
                [found] = graphs
                if found in branches:
                    place[each] = found
                    moved[found].append(each)
        for branch, nodes in moved.items():
            graph.remove(nodes)
            branch.insert_before(branch[0], nodes[::-1])
            for index, value in enumerate(tuple(branch.outputs)):
                named = value.producer()
                source = named.inputs[0] if named is not None else None
                is_own = source is not None and source.producer() in place and source not in branch.outputs
                if named is not None and source is not None and is_own and g.only_user(source) is named:
                    branch.outputs[index] = source
                    branch.remove(named, safe=True)
