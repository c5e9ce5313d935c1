// Reading a library's table (kernels/abi.h): what both adapters do when a library is loaded.
#pragma once

#include "kernels/abi.h"
#include "kernels/record/record.h"

namespace twinop {

// The table has the ABI version of this code. `reader` is the adapter, for the message.
Status CheckTable(const twinop_table* table, const char* reader);

// The record of one of the table's ops. It refers to the table's texts. Throws (const char*) where
// they do not parse.
Record ReadRecord(const twinop_table& table, const twinop_op& op);

}  // namespace twinop
