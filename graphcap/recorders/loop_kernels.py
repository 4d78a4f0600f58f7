"""The two kernels of a loop on the device, in PTX: what starts it, and what decides whether it goes on.

The driver compiles them and knows the device function ``cudaGraphSetConditional``, so neither a compiler
nor a library is needed. Both run as one warp. Source: PTX ISA; CUDA Programming Guide, "Conditional Graph
Nodes".
"""

from __future__ import annotations

BEGIN = "graphcap_begin"
GO_ON = "graphcap_go_on"

WARP = 32

PTX = f"""
.version 6.4
.target sm_70
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);

// place[0 .. words) = source[0 .. words), words of 8 bytes.
.visible .entry {BEGIN} (
    .param .u64 place, .param .u64 source, .param .u32 words
)
{{
    .reg .pred  %p<2>;
    .reg .b32   %r<3>;
    .reg .b64   %d<7>;

    ld.param.u64    %d1, [place];
    ld.param.u64    %d2, [source];
    ld.param.u32    %r1, [words];
    cvta.to.global.u64  %d1, %d1;
    cvta.to.global.u64  %d2, %d2;

    mov.u32         %r2, %tid.x;
COPY:
    setp.ge.u32     %p1, %r2, %r1;
    @%p1 bra        COPIED;
    mul.wide.u32    %d3, %r2, 8;
    add.u64         %d4, %d2, %d3;
    add.u64         %d5, %d1, %d3;
    ld.global.u64   %d6, [%d4];
    st.global.u64   [%d5], %d6;
    add.u32         %r2, %r2, {WARP};
    bra             COPY;
COPIED:
    ret;
}}

// left -= 1; the loop goes on while left > 0 and any of live[0 .. rows) is set.
.visible .entry {GO_ON} (
    .param .u64 handle, .param .u64 left, .param .u64 live, .param .u32 rows
)
{{
    .reg .pred  %p<5>;
    .reg .b32   %r<8>;
    .reg .b64   %d<6>;

    ld.param.u64    %d1, [handle];
    ld.param.u64    %d2, [left];
    ld.param.u64    %d3, [live];
    ld.param.u32    %r1, [rows];
    cvta.to.global.u64  %d2, %d2;
    cvta.to.global.u64  %d3, %d3;

    mov.u32         %r2, %tid.x;
    mov.u32         %r3, 0;
    mov.u32         %r4, %r2;
NEXT:
    setp.ge.u32     %p1, %r4, %r1;
    @%p1 bra        SEEN;
    cvt.u64.u32     %d4, %r4;
    add.u64         %d5, %d3, %d4;
    ld.global.u8    %r5, [%d5];
    or.b32          %r3, %r3, %r5;
    add.u32         %r4, %r4, {WARP};
    bra             NEXT;
SEEN:
    setp.ne.u32     %p2, %r3, 0;
    vote.sync.any.pred  %p3, %p2, 0xffffffff;
    setp.ne.u32     %p4, %r2, 0;
    @%p4 bra        DONE;
    ld.global.u32   %r6, [%d2];
    sub.u32         %r6, %r6, 1;
    st.global.u32   [%d2], %r6;
    setp.gt.and.s32 %p3, %r6, 0, %p3;
    selp.u32        %r7, 1, 0, %p3;
    {{
    .param .b64 to;
    .param .b32 value;
    st.param.b64    [to], %d1;
    st.param.b32    [value], %r7;
    call.uni        cudaGraphSetConditional, (to, value);
    }}
DONE:
    ret;
}}
"""
