"""The APIs of the gateway. Each is a folder of one form, with one row in `app.DIALECTS`. No API imports another one."""
