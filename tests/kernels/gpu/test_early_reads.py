"""A product that is read before it is complete is found in what Triton makes of a kernel."""

from __future__ import annotations

import pytest

from tokenmill.kernels.gpu.compile import early_reads

PRODUCT = "    %acc = ttng.warp_group_dot %p, %v, %old {isAsync = true} : a * b -> c loc(#l)\n"
WAIT = "    %sum:2 = ttng.warp_group_dot_wait %acc, %v {pendings = 0 : i32} : c, b loc(#l)\n"
OTHER = "    %acc_1 = arith.addf %x, %x : c loc(#l)\n"
READ = "    %next = arith.select %done, %zero, %acc : c loc(#l)\n"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (PRODUCT + OTHER + READ, [READ.strip()]),
        (PRODUCT + OTHER + WAIT + READ, []),
        (PRODUCT + "    scf.yield %acc, %n : c, i32 loc(#l)\n" + READ, []),
        (PRODUCT, []),
        (PRODUCT.replace("true", "false") + READ, []),
        (PRODUCT.replace("%acc", "%acc:2") + READ.replace("%acc", "%acc#0"), None),
    ],
    ids=["read", "waited for", "passed on", "unused", "synchronous", "of several results"],
)
def test_early_reads(code, found):
    if found is None:
        assert early_reads(code) == [READ.strip().replace("%acc", "%acc#0")]
    else:
        assert early_reads(code) == found
