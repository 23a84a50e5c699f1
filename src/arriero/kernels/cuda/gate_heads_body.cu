arriero::gate_heads<DIM, HEADS, KV_HEADS>((const arriero::bf16*)rows, (const arriero::bf16*)y, (arriero::bf16*)out);
