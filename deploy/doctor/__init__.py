"""`twinop doctor`: `facts` looks at the machine, `checks` judges that, `command` shows it."""
