"""Adapters of any maker: read, brought into PEFT, and written in the form of any program."""
