"""A report about bundles: plans as drawings and tables, on one page of HTML."""
