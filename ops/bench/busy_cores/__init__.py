"""The native engine beside other load: busy loops on every core, a second engine, a CPU quota."""
